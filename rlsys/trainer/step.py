"""One train step, in the order in which it runs:

    plan        a table with a row per sample; the trained rows, and the optimizer update of each
    pack        this rank's micro-batches of each update
    score       signals of the objective: log-probs (old, reference, averages, teacher), values of a critic
    advantages  advantage and weight of every token
    loss        the loss of each micro-batch, and its gradient
    update      one optimizer update for each list of micro-batches

rlsys.train takes the step's groups before the step and pushes the weights after it. The objective defines the
computation of each stage (rlsys.algo.objective); the trainer runs it. All functions are collective: every rank passes
the same groups and gets the same table. Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlsys.algo.batch import Samples, fork_columns
from rlsys.algo.figures import engine_gaps, loss_metrics
from rlsys.algo.objective import Objective, StepPlan
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import LogProbRequest, LogProbResult, Sample, SampleGroup, TrainBatch
from rlsys.obs.metrics import MISMATCH_EDGES
from rlsys.segments.route_records import load_with_routes
from rlsys.trainer.critic import Critic
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import LazySample, MicroBatch
from rlsys.trainer.teacher import Teachers
from rlsys.trainer.token_log import MicroBatchRecord
from rlsys.trainer.trainer import Trainer, UpdateResult, learning_rate


def train_step(
    trainer: Trainer,
    objective: Objective,
    train_batch: TrainBatch,
    early: EarlyPasses | None = None,
    records: list[MicroBatchRecord] | None = None,
) -> dict[str, object]:
    """Train on the groups of a batch.

    Args:
        trainer: The policy's trainer.
        objective: Defines the computation.
        train_batch: The step's groups.
        early: Backward passes that have already run for some of these groups; None: no passes have run.
        records: Receives the token records of this rank's micro-batches.

    Returns:
        The step's metrics.
    """
    step, config = train_batch.train_step, trainer.config
    needs = objective.requirements.needs
    sums: dict[str, Tensor] = {}
    records = [] if records is None else records

    table = sample_table(train_batch.groups, step, needs)
    objective.start(trainer.named_parameters)
    plan = objective.plan(table)
    metrics: dict[str, object] = {}
    early_groups = set[int]() if early is None else early.group_ids
    if early is not None:
        metrics |= early.metrics(train_batch)
    if plan.rows:  # otherwise the rewards within every group are equal, and no token has a gradient
        rows = [r for r in plan.rows if int(plan.samples.group_ids[r]) not in early_groups]
        updates = shuffled(rows, config.algo.minibatches, (config.run.seed, step))
        metrics |= learn(
            trainer, objective, plan, train_batch, updates, sums, config.algo.epochs, records=records
        )
    metrics["effective_groups"] = len({int(plan.samples.group_ids[r]) for r in plan.trained})
    metrics |= _train_deferred(trainer, objective, plan, train_batch, sums)

    loss_figures = loss_metrics(sums, needs) if sums else {}
    objective.after_version(trainer.named_parameters, loss_figures.get("active_share", 1.0))
    return metrics | _mismatch_metrics(sums) | loss_figures


def _train_deferred(
    trainer: Trainer,
    objective: Objective,
    plan: StepPlan,
    train_batch: TrainBatch,
    sums: dict[str, Tensor],
) -> dict[str, object]:
    """Defer samples of this step, and run a separate update on earlier deferred samples that are due now.

    Adds the sums of the loss to `sums`. Returns the metrics of the update; empty if no sample is due.
    """
    step, load = train_batch.train_step, partial(load_with_routes, trainer.segments)
    due = objective.defer(plan, train_batch.groups, step, load)
    if not due:
        return {}
    due_batch = replace(train_batch, groups=[group for group, _ in due])
    table = sample_table(due_batch.groups, step, objective.requirements.needs)
    due_plan = objective.plan_deferred(table, torch.tensor([advantage for _, advantage in due]))
    metrics = learn(trainer, objective, due_plan, due_batch, [due_plan.rows], sums)
    return {"replayed": len(due), **metrics}


def _mismatch_metrics(sums: dict[str, Tensor]) -> dict[str, object]:
    """Return mean and histogram of the gap to the engine's log-probs (rlsys.algo.figures.engine_gaps).

    `mismatch` covers all comparable tokens, `mismatch_kept` those of responses that older weights started.
    """
    metrics: dict[str, object] = {}
    for name in ("mismatch", "mismatch_kept") if "mismatch" in sums else ():
        counts = sums[f"{name}_counts"]
        if tokens := int(counts.sum()):
            metrics[f"{name}_mean"] = float(sums[name]) / tokens
            metrics[f"{name}_hist"] = [int(n) for n in counts]
    return metrics


def learn(
    trainer: Trainer,
    objective: Objective,
    plan: StepPlan,
    train_batch: TrainBatch,
    updates: Sequence[list[int]],
    sums: dict[str, Tensor],
    epochs: int = 1,
    *,
    records: list[MicroBatchRecord] | None = None,
) -> dict[str, object]:
    """Run one optimizer update for each list of rows.

    Further epochs repeat the updates in the same order, with the advantages and the scores of the first epoch; only
    the signal `current` is computed again. A list without a token with a gradient, according to its advantages or
    after clips and corrections, gets no update; `updates_without_gradient` counts such lists. A separate critic is
    updated before the policy. During the critic's warm-up, the policy is not updated.

    Args:
        trainer: The policy's trainer.
        objective: Defines the computation.
        plan: Plan of the step.
        train_batch: The step's groups.
        updates: Rows of the sample table for each update. Empty: all rows have had early backward passes, and one
            update applies their gradient.
        sums: Receives the sums of the loss function over all updates of the policy.
        epochs: Number of epochs.
        records: Receives the token records of the first epoch. None: the weights have already changed in this step.

    Returns:
        The metrics of the last update that had a gradient, or those of the critic during its warm-up.
    """
    samples = [s for group in train_batch.groups for s in group.samples]
    split = splits_samples(objective, samples, plan.rows)
    batches = prepare_batches(trainer, objective, plan, train_batch, updates)
    has_gradient = [objective.trains(batch, trainer.passes.sum_over_dp) for batch in batches]
    epoch_updates = [
        (rows, batch) for rows, batch, trained in zip(updates, batches, has_gradient, strict=True) if trained
    ]
    without_gradient = (len(updates) - len(epoch_updates)) * epochs if batches else 0
    if not batches:
        epoch_updates = [([], [])]

    critic = trainer.critic if objective.critic is not None else None
    assert critic is None or isinstance(critic, Critic)
    t = trainer.config.trainer
    policy_lr = learning_rate(t, train_batch.train_step, t.schedule, t.lr_end)
    denominator = plan.denominator / max(1, len(updates))
    figures: dict[str, object] = {}
    skipped = 0
    for i, (rows, batch) in enumerate(epoch_updates * epochs):
        _prepare_update(trainer, objective, batch, weights_changed=i > 0, split=split)
        lr_factor = objective.lr_factor(plan, rows) if objective.hooks else 1.0
        critic_figures: dict[str, object] = {}
        if critic is not None:
            critic_figures = critic.improve(objective, batch, policy_lr, denominator)
            if train_batch.train_step <= critic.warmup_steps:
                figures = critic_figures
                continue

        loss = partial(
            micro_loss,
            objective,
            compare=records is not None and i == 0,
            records=records if i < len(epoch_updates) else None,
            samples=samples,
        )
        lr = policy_lr * lr_factor
        result = trainer.update(batch, loss, lr, denominator=denominator)
        _add_sums(sums, result.sums)
        if result.without_gradient:
            without_gradient += 1
            figures |= critic_figures
            continue
        objective.after_step(
            trainer.named_parameters, loss_metrics(result.sums, objective.requirements.needs)
        )
        skipped += result.skipped
        figures = critic_figures | _update_metrics(result, lr, skipped)
    if without_gradient:
        figures["updates_without_gradient"] = without_gradient
    return figures


def _prepare_update(
    trainer: Trainer,
    objective: Objective,
    batch: list[MicroBatch],
    *,
    weights_changed: bool,
    split: bool,
) -> None:
    """Compute `current` again and let plug-ins prepare the update, if the objective requires it.

    Args:
        trainer: The policy's trainer.
        objective: Defines the computation.
        batch: This rank's micro-batches of the update.
        weights_changed: Whether the weights have changed since `batch` was scored.
        split: See splits_samples.
    """
    if weights_changed and ("current" in objective.requirements.passes or split):
        for micro, logp in zip(batch, trainer.passes.logprobs(batch), strict=True):
            micro.current = logp
    if objective.requirements.prepares or split:
        objective.prepare(batch, trainer.passes.sum_over_dp, split_samples=split)


def _add_sums(sums: dict[str, Tensor], update_sums: dict[str, Tensor]) -> None:
    for name, value in update_sums.items():
        sums[name] = sums[name] + value if name in sums else value


def _update_metrics(result: UpdateResult, lr: float, skipped: int) -> dict[str, object]:
    """Return the metrics of an update. `skipped`: number of skipped updates of the step so far."""
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "skipped_updates": skipped,
        "padding_share": result.padding_share,
        "shared_share": result.shared_share,
        **result.routing,
        **result.prediction,
    }


def splits_samples(objective: Objective, samples: Sequence[Sample], rows: Sequence[int]) -> bool:
    """Return whether a plug-in aggregates over whole samples, and a sample of `rows` has several sequences.

    Micro-batches, also of different ranks, may then contain different parts of a sample.
    """
    return objective.requirements.whole_samples and any(len(samples[r].trained_sequences) > 1 for r in rows)


def prepare_batches(
    trainer: Trainer,
    objective: Objective,
    plan: StepPlan,
    train_batch: TrainBatch,
    updates: Sequence[list[int]],
) -> list[list[MicroBatch]]:
    """Pack and score the rows of each update, and compute advantages.

    Returns:
        This rank's micro-batches of each update, with everything that the loss needs.
    """
    passes = trainer.passes
    batches = [pack_rows(train_batch, rows, trainer) for rows in updates]
    if not batches:
        return batches
    samples = [s for group in train_batch.groups for s in group.samples]
    # All scoring passes precede the first update, because they need the weights at the start of the step.
    score_policy(batches, objective, trainer, split=splits_samples(objective, samples, plan.rows))
    if objective.requirements.passes & EXTRA_SIGNALS:
        score_extra_signals(batches, objective, trainer)
    objective.finish(plan, [micro for batch in batches for micro in batch], passes.sum_over_dp)
    return batches


# -- plan ---------------------------------------------------------------------------------------------------


def sample_table(groups: Sequence[SampleGroup], train_step: int, needs: Collection[str]) -> Samples:
    """Build a table with one row per sample, in the order of the groups.

    Args:
        groups: The groups of the step.
        train_step: Number of the step, from 1.
        needs: Names of the optional columns to include.
    """
    samples = [s for group in groups for s in group.samples]
    columns: dict[str, Any] = {}
    if "answers" in needs:
        columns["answers"] = torch.tensor([answer_id(s.answer) for s in samples])
    if "transferred" in needs:
        columns["transferred"] = torch.tensor([s.trained_prompt is not None for s in samples])
    if "forks" in needs:
        columns |= fork_columns(samples)
    if "tool_penalty" in needs:
        columns["tool_penalty"] = torch.tensor([s.tool_penalty for s in samples])
    if "turn_rewards" in needs:
        columns |= turn_columns(samples)
    return replace(Samples.of(groups, train_step - 1), **columns)


def turn_columns(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return the columns `turn_rewards`, `turn_matches` and `turn_counts` of the sample table.

    Raises:
        UserError: A sample has no turn rewards.
    """
    if missing := [s.sample_id for s in samples if s.turn_rewards is None]:
        raise UserError(
            f"algo: sample {missing[0]} has no rewards of its turns, which a plug-in needs; expected "
            "rollout.generator = environment, or a data.reward that also returns turn_rewards"
        )
    rewards_of_samples = [s.turn_rewards or () for s in samples]
    counts = torch.tensor([len(turn_rewards) for turn_rewards in rewards_of_samples])
    shape = len(samples), max(1, int(counts.max()))
    rewards, matches = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for row, turn_rewards in enumerate(rewards_of_samples):
        for turn, turn_reward in enumerate(turn_rewards):
            rewards[row, turn], matches[row, turn] = turn_reward.reward, turn_reward.matched
    return {"turn_rewards": rewards, "turn_matches": matches, "turn_counts": counts}


def answer_id(answer: str | None) -> int:
    """Return a 24-bit hash of an answer, which float32 represents exactly; -1 for None."""
    return -1 if answer is None else zlib.crc32(answer.encode()) & 0xFFFFFF


def shuffled(rows: Sequence[int], parts: int, seed: tuple[int, int]) -> list[list[int]]:
    """Distribute rows in random order to at most `parts` non-empty lists. `seed`: (run.seed, train step)."""
    generator = torch.Generator().manual_seed(seed[0] * 1_000_003 + seed[1])
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [[rows[i] for i in order[k::parts]] for k in range(min(parts, len(rows)))]


# -- pack ---------------------------------------------------------------------------------------------------


def pack_rows(train_batch: TrainBatch, rows: Sequence[int], trainer: Trainer) -> list[MicroBatch]:
    """Return this rank's micro-batches of these rows of the sample table."""
    samples = [s for group in train_batch.groups for s in group.samples]
    lazy_samples = []
    for row in rows:
        sequences = samples[row].trained_sequences
        first_turns = accumulate((len(sequence.turns()) for sequence in sequences[:-1]), initial=0)
        lazy_samples += [
            LazySample(sequence, row, trainer.segments, trainer.replayed_layers, first_turn)
            for sequence, first_turn in zip(sequences, first_turns, strict=False)
        ]
    batch = trainer.passes.pack(lazy_samples)
    teachers = None
    if train_batch.sources and isinstance(trainer.teacher, Teachers):
        teacher_of_group = [trainer.teacher.index_of(source) for source in train_batch.sources]
        teacher_of_sample = [
            number for number, g in zip(teacher_of_group, train_batch.groups, strict=True) for _ in g.samples
        ]
        teachers = torch.tensor(teacher_of_sample, dtype=torch.float32)
    for micro in batch:
        micro.version, micro.teachers = train_batch.weight_version, teachers
    return batch


# -- score --------------------------------------------------------------------------------------------------


EXTRA_SIGNALS = frozenset({"values", "divergence", "ref", "ewma"})
"""Signals of other models, or of the policy's model with other weights."""


def score_policy(
    batches: Sequence[list[MicroBatch]], objective: Objective, trainer: Trainer, *, split: bool
) -> None:
    """Compute `old` and the other signals of the policy, if the objective or replay needs them.

    Args:
        batches: This rank's micro-batches of each update.
        objective: Defines the signals.
        trainer: The policy's trainer.
        split: See splits_samples.
    """
    needs = objective.requirements
    own_experts = trainer.config.trainer.replay == "trainer"
    if not (needs.scored & needs.current or own_experts or split):
        return
    # The first update starts with the scoring weights, so that its own log-probs are `old`. It needs a scoring pass
    # only if a plug-in needs them earlier, if replay needs the experts of the pass (trainer.replay = trainer), or if
    # further epochs train the samples again after the weights have changed.
    reuse = not (needs.looks_ahead or own_experts or trainer.config.algo.epochs > 1 or split)
    for i, batch in enumerate(batches):
        scores = [None] * len(batch) if reuse and i == 0 else trainer.passes.score(batch)
        for micro, score in zip(batch, scores, strict=True):
            behaviour = torch.full_like(micro.mu, torch.nan) if micro.behaviour is None else micro.behaviour
            if score is None:
                micro.old_is_current = True
            else:
                micro.old = micro.current = score.logp
                micro.entropy, micro.values = score.entropy, score.values
                micro.sum_pi_squared = score.sum_pi_squared
                behaviour = torch.where(micro.versions == micro.version, score.logp, behaviour)
            if "behaviour" in needs.passes:
                micro.behaviour = behaviour


def score_extra_signals(batches: Sequence[list[MicroBatch]], objective: Objective, trainer: Trainer) -> None:
    """Run the scoring passes of critic, teacher, reference and averages that the objective needs.

    Raises:
        RunError: A sample has no log-probs of the teacher's engine.
    """
    passes = objective.requirements.passes
    if "values" in passes and objective.critic is not None:
        assert isinstance(trainer.critic, Critic), "add_critic comes before the first step"
        trainer.critic.score_values(batches)
    if "divergence" in passes and trainer.teacher is None:  # an engine has scored the samples
        if any(micro.teacher_ids is None for batch in batches for micro in batch):
            raise RunError(
                "algo.teacher.engine: the step has samples without log-probs of the teacher; expected log-probs for "
                "all samples"
            )
    elif "divergence" in passes:
        assert isinstance(trainer.teacher, Teachers), "add_teacher comes before the first step"
        trainer.teacher.score(batches)

    def score_weights(weights: Mapping[str, Tensor], name: str) -> None:
        with trainer.with_weights(weights):
            for batch in batches:
                for micro, logp in zip(batch, trainer.passes.logprobs(batch), strict=True):
                    setattr(micro, name, logp)

    if "ref" in passes:
        with trainer.without_replay():
            score_weights(objective.reference() or trainer.first_weights, "ref")
    if "ewma" in passes:
        score_weights(objective.average(), "ewma")


# -- loss ---------------------------------------------------------------------------------------------------


def micro_loss(
    objective: Objective,
    scores: Scores,
    micro: MicroBatch,
    *,
    compare: bool,
    records: list[MicroBatchRecord] | None = None,
    samples: Sequence[Sample] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one packed micro-batch.

    Args:
        objective: Defines the loss.
        scores: Scores of the micro-batch, with gradient.
        micro: The micro-batch.
        compare: Whether to add sums of the gap between the scores and the engine's log-probs. They measure the
            mismatch of trainer and engine only while the weights are those at the start of the step.
        records: Receives the token records for the viewer; None: no records.
        samples: The rows of the sample table, for `records`.

    Returns:
        The sum of the tokens' losses, and sums for metrics.
    """
    if records is not None and micro.mask.any():  # another rank records the original of a masked copy
        logp = scores.logp if compare else micro.old
        logp, advantages = (None if v is None else v.detach().cpu() for v in (logp, micro.advantages))
        records.append(
            MicroBatchRecord(
                samples,
                micro.rows.tolist(),
                micro.sequence_index,
                micro.cu_seqlens.tolist(),
                logp,
                advantages,
            )
        )
    loss, sums = objective(scores.logp, micro, scores.entropy, scores.values, scores.divergence)
    if compare:
        sums |= engine_gaps(scores.logp, micro, len(MISMATCH_EDGES) - 1)
    return loss, sums


# -- before the step ----------------------------------------------------------------------------------------


@dataclass
class EarlyPasses:
    """Record of the backward passes that ran before all groups of their step were complete.

    Attributes:
        group_ids: Groups of these passes.
        samples: Number of their samples.
        seconds: Duration of the passes.
        records: Token records of the passes.
    """

    group_ids: set[int] = field(default_factory=set)
    samples: int = 0
    seconds: float = 0.0
    records: list[MicroBatchRecord] = field(default_factory=list)

    def metrics(self, train_batch: TrainBatch) -> dict[str, float]:
        """Return `early_share`, the share of these samples in the step, and `time_early`, the duration in seconds."""
        share = self.samples / sum(len(g.samples) for g in train_batch.groups)
        return {"early_share": share, "time_early": self.seconds}


def backward_early(trainer: Trainer, objective: Objective, part: TrainBatch, early: EarlyPasses) -> None:
    """Run the backward passes of some groups of a step, before the step is complete, and add them to `early`.

    `train_step` later applies the gradient, divided by the denominator of the whole step.
    """
    start = time.monotonic()
    plan = objective.plan(sample_table(part.groups, part.train_step, objective.requirements.needs))
    samples = [s for group in part.groups for s in group.samples]
    split = splits_samples(objective, samples, plan.rows)
    for batch in prepare_batches(trainer, objective, plan, part, [plan.rows] if plan.rows else []):
        if split:
            objective.prepare(batch, trainer.passes.sum_over_dp, split_samples=True)
        loss = partial(micro_loss, objective, compare=True, records=early.records, samples=samples)
        trainer.passes.accumulate(batch, loss)
    early.group_ids |= {g.group_id for g in part.groups}
    early.samples += sum(len(g.samples) for g in part.groups)
    early.seconds += time.monotonic() - start


def score_parked(unscored: Sequence[LogProbRequest], trainer: Trainer) -> list[LogProbResult]:
    """Compute the log-probs of unfinished sequences' tokens under the weights that sampled these tokens.

    It must run before the next update, so that the step that trains the tokens knows their exact `old`. With
    trainer.replay = engine, the pass replays the engine's experts, as that step does. It covers whole sequences,
    because a token's log-prob depends on all its predecessors.

    Args:
        unscored: Sequences, each with its first token to score.
        trainer: The policy's trainer.
    """
    if not unscored:
        return []
    layers = trainer.replayed_layers
    batch = trainer.passes.pack(
        [LazySample(u.sample, row, trainer.segments, layers) for row, u in enumerate(unscored)]
    )
    local_logprobs: dict[int, list[float]] = {}
    for micro, logp in zip(batch, trainer.passes.logprobs(batch), strict=True):
        ends = micro.cu_seqlens[1:].tolist()
        for row, end in zip(micro.rows.tolist(), ends, strict=True):
            tokens = unscored[row].sample.tokens - unscored[row].start
            local_logprobs[row] = logp[end - tokens : end].tolist()
    logprobs = {row: logp for part in trainer.gather_dp(local_logprobs) for row, logp in part.items()}
    return [
        LogProbResult(u.sample.sample_id, u.start, logprobs[row], u.sample.sequence)
        for row, u in enumerate(unscored)
    ]
