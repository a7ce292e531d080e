"""One train step, in the order in which it runs:

    plan        a table with a row per sample; the trained rows, and the optimizer update of each
    pack        this rank's micro-batches of each update
    score       signals of the objective: log-probs (old, reference, averages, teacher), values of a critic
    advantages  advantage and weight of every token
    loss        the loss of each micro-batch, and its gradient
    update      one optimizer update for each list of micro-batches

`take` precedes it and the push follows it, in rlsys.train. The objective defines the computation of each stage
(rlsys.algo.objective); the trainer runs it. Every rank calls every function together, with the same groups, and gets
the same table. Shapes: T tokens of a micro-batch.
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
from rlsys.trainer.trainer import Trainer, learning_rate


def train_step(
    trainer: Trainer,
    objective: Objective,
    train_batch: TrainBatch,
    early: EarlyPasses | None = None,
    records: list[MicroBatchRecord] | None = None,
) -> dict[str, object]:
    """Train on the groups of a batch, some of which may already have had early backward passes.

    Returns the step's metrics; adds to `records`.
    """
    step, config = train_batch.train_step, trainer.config
    sums: dict[str, Tensor] = {}
    records = [] if records is None else records

    table = sample_table(train_batch.groups, step, objective.requirements.needs)
    objective.start(trainer.named_parameters)
    plan = objective.plan(table)
    metrics: dict[str, object] = {}
    early_groups = set[int]() if early is None else early.group_ids
    if early is not None:
        metrics |= early.metrics(train_batch)
    if plan.rows:  # otherwise every group's rewards are equal: nothing to learn
        rows = [r for r in plan.rows if int(plan.samples.group_ids[r]) not in early_groups]
        updates = shuffled(rows, config.algo.minibatches, (config.run.seed, step))
        metrics |= learn(
            trainer, objective, plan, train_batch, updates, sums, config.algo.epochs, records=records
        )
    metrics["effective_groups"] = len({int(plan.samples.group_ids[r]) for r in plan.trained})

    # Deferred samples of earlier steps that are due now get a separate update.
    if due := objective.defer(plan, train_batch.groups, step, partial(load_with_routes, trainer.segments)):
        due_batch = replace(train_batch, groups=[group for group, _ in due])
        table = sample_table(due_batch.groups, step, objective.requirements.needs)
        plan = objective.plan_deferred(table, torch.tensor([advantage for _, advantage in due]))
        metrics |= {
            "replayed": len(due),
            **learn(trainer, objective, plan, due_batch, [plan.rows], sums),
        }

    loss_figures = loss_metrics(sums, objective.requirements.needs) if sums else {}
    objective.after_version(trainer.named_parameters, loss_figures.get("active_share", 1.0))
    for name in ("mismatch", "mismatch_kept") if "mismatch" in sums else ():
        if compared := int(sums[f"{name}_counts"].sum()):
            hist = [int(n) for n in sums[f"{name}_counts"]]
            metrics |= {f"{name}_mean": float(sums[name]) / compared, f"{name}_hist": hist}
    return metrics | loss_figures


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

    Without lists, all rows have had early backward passes, and one update applies them. A list gets no update if none
    of its tokens has a gradient, by the advantages or after clips and corrections (`updates_without_gradient`).
    Further `epochs` repeat the same lists in the same order, with the advantages and the scores of the first; only
    the signal `current` is recomputed. A separate critic is updated first; during its warm-up it alone is updated,
    and nothing is added.

    Adds to `sums` and to `records`; returns the metrics of the last update that was made. `records` None: an earlier
    call has updated in this step.
    """
    figures: dict[str, object] = {}
    samples = [s for group in train_batch.groups for s in group.samples]
    split = splits_samples(objective, samples, plan.rows)
    batches = prepare_batches(trainer, objective, plan, train_batch, updates)
    trained = [objective.trains(batch, trainer.passes.sum_over_dp) for batch in batches]

    t, skipped = trainer.config.trainer, 0
    critic = trainer.critic if objective.critic is not None else None
    assert critic is None or isinstance(critic, Critic)
    share = plan.denominator / max(1, len(updates))
    one_pass = [pair for pair, has in zip(zip(updates, batches, strict=True), trained, strict=True) if has]
    one_pass = one_pass if batches else [([], [])]
    without_gradient = (len(updates) - len(one_pass)) * epochs if batches else 0
    for i, (rows, batch) in enumerate(one_pass * epochs):
        if i and (
            "current" in objective.requirements.passes or split
        ):  # the weights have changed since the scores
            for micro, logp in zip(batch, trainer.passes.logprobs(batch), strict=True):
                micro.current = logp
        if objective.requirements.prepares or split:
            objective.prepare(batch, trainer.passes.sum_over_dp, split_samples=split)
        factor = objective.lr_factor(plan, rows) if objective.hooks else 1.0
        rate = learning_rate(t, train_batch.train_step, t.schedule, t.lr_end)
        first, pass_records = records is not None and i == 0, records if i < len(one_pass) else None
        loss = partial(micro_loss, objective, compare=first, records=pass_records, samples=samples)
        critic_figures: dict[str, object] = {}
        if critic is not None:
            critic_figures = critic.improve(objective, batch, rate, share)
            if train_batch.train_step <= critic.warmup_steps:
                figures = critic_figures
                continue

        lr = rate * factor
        result = trainer.update(batch, loss, lr, denominator=share)
        for name, value in result.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        if result.without_gradient:
            without_gradient += 1
            figures |= critic_figures
            continue
        objective.after_step(
            trainer.named_parameters, loss_metrics(result.sums, objective.requirements.needs)
        )

        skipped += result.skipped
        figures = {
            **critic_figures, "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr,
            "skipped_updates": skipped, "padding_share": result.padding_share,
            "shared_share": result.shared_share, **result.routing, **result.prediction,
        }  # fmt: skip
    return figures | ({"updates_without_gradient": without_gradient} if without_gradient else {})


def splits_samples(objective: Objective, samples: Sequence[Sample], rows: Sequence[int]) -> bool:
    """Return whether a plug-in aggregates over whole samples, and a sample may be in several micro-batches."""
    return objective.requirements.whole_samples and any(len(samples[r].trained_sequences) > 1 for r in rows)


def prepare_batches(
    trainer: Trainer,
    objective: Objective,
    plan: StepPlan,
    train_batch: TrainBatch,
    updates: Sequence[list[int]],
) -> list[list[MicroBatch]]:
    """Pack, score, and compute advantages: this rank's micro-batches of each update, complete for their loss."""
    asks, passes, config = objective.requirements, trainer.passes, trainer.config
    batches = [pack_rows(train_batch, rows, trainer) for rows in updates]
    if not batches:
        return batches

    # All passes precede the first update, because later weights would give other scores. The first update starts
    # with the scoring weights, so that its own log-probs are `old`, unless a plug-in needs them earlier. The experts
    # of a scoring pass (trainer.replay = trainer) are needed earlier, too, and with further epochs the samples are
    # trained again after the weights have changed.
    own_experts = config.trainer.replay == "trainer"
    split = splits_samples(objective, [s for group in train_batch.groups for s in group.samples], plan.rows)
    reuse = not (asks.looks_ahead or own_experts or config.algo.epochs > 1 or split)
    for i, batch in enumerate(batches if asks.scored & asks.current or own_experts or split else ()):
        scores = [None] * len(batch) if reuse and i == 0 else passes.score(batch)
        for micro, score in zip(batch, scores, strict=True):
            behaviour = torch.full_like(micro.mu, torch.nan) if micro.behaviour is None else micro.behaviour
            if score is None:
                micro.old_is_current = True
            else:
                micro.old = micro.current = score.logp
                micro.entropy, micro.values = score.entropy, score.values
                micro.sum_pi_squared = score.sum_pi_squared
                behaviour = torch.where(micro.versions == micro.version, score.logp, behaviour)
            if "behaviour" in asks.passes:
                micro.behaviour = behaviour
    if asks.passes & EXTRA_SIGNALS:
        score_extra_signals(batches, objective, trainer)

    objective.finish(plan, [micro for batch in batches for micro in batch], passes.sum_over_dp)
    return batches


# -- plan ---------------------------------------------------------------------------------------------------


def sample_table(groups: Sequence[SampleGroup], train_step: int, needs: Collection[str]) -> Samples:
    """Build one row per sample of the step, in the order of its groups; of the optional columns, those in `needs`."""
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
    """Return the columns of turn rewards, by name.

    Raises:
        UserError: a sample has no turn rewards.
    """
    marks = [s.turn_rewards for s in samples]
    if missing := [s.sample_id for s in samples if s.turn_rewards is None]:
        raise UserError(
            f"algo: sample {missing[0]} has no rewards of its turns, which a plug-in needs; expected "
            "rollout.generator = environment, or a data.reward that also returns turn_rewards"
        )
    counts = torch.tensor([len(m or ()) for m in marks])
    shape = len(samples), max(1, int(counts.max()))
    rewards, matches = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for row, turns in enumerate(marks):
        for turn, mark in enumerate(turns or ()):
            rewards[row, turn], matches[row, turn] = mark.reward, mark.matched
    return {"turn_rewards": rewards, "turn_matches": matches, "turn_counts": counts}


def answer_id(answer: str | None) -> int:
    """Return a 24-bit number that is equal for equal answers in every process and exact in float32; -1 for None."""
    return -1 if answer is None else zlib.crc32(answer.encode()) & 0xFFFFFF


def shuffled(rows: Sequence[int], parts: int, seed: tuple[int, int]) -> list[list[int]]:
    """Distribute rows in random order to at most `parts` non-empty lists. `seed`: (run.seed, train step)."""
    generator = torch.Generator().manual_seed(seed[0] * 1_000_003 + seed[1])
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [dealt for k in range(parts) if (dealt := [rows[i] for i in order[k::parts]])]


# -- pack ---------------------------------------------------------------------------------------------------


def pack_rows(train_batch: TrainBatch, rows: Sequence[int], trainer: Trainer) -> list[MicroBatch]:
    """Return this rank's micro-batches of these rows of the sample table."""
    samples, layers = [s for group in train_batch.groups for s in group.samples], trainer.replayed_layers
    unread = []
    for row in rows:
        sequences = samples[row].trained_sequences
        first_turns = accumulate((len(q.turns()) for q in sequences[:-1]), initial=0)
        unread += [
            LazySample(q, row, trainer.segments, layers, n)
            for q, n in zip(sequences, first_turns, strict=False)
        ]
    batch = trainer.passes.pack(unread)
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
"""Signals of other models, or of this one with other weights."""


def score_extra_signals(batches: Sequence[list[MicroBatch]], objective: Objective, trainer: Trainer) -> None:
    """Run the passes of other models and of other weights: critic, teacher, reference, averages."""
    passes = objective.requirements.passes
    if "values" in passes and objective.critic is not None:
        assert isinstance(trainer.critic, Critic), "add_critic comes before the first step"
        trainer.critic.score_values(batches)
    if "divergence" in passes and trainer.teacher is None:  # an engine has scored the samples
        if any(micro.teacher_ids is None for batch in batches for micro in batch):
            raise RunError(
                "algo.teacher.engine: a sample of the step has no log-probs of the teacher; expected all"
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
    """Compute the loss sum of one packed micro-batch, and sums for the metrics.

    `compare`: the weights are still those at the start of the step, so that log-probs must equal those of the engine.
    After an update the same difference measures how far the weights have moved. `records`: gets the token records for
    the viewer; `samples`: the rows of the sample table.
    """
    if records is not None and micro.mask.any():  # otherwise it fills a bin, and another rank trains it
        logp = scores.logp if compare else micro.old
        figures = [None if v is None else v.detach().cpu() for v in (logp, micro.advantages)]
        records.append(
            MicroBatchRecord(
                samples, micro.rows.tolist(), micro.sequence_index, micro.cu_seqlens.tolist(), *figures
            )
        )
    loss, sums = objective(scores.logp, micro, scores.entropy, scores.values, scores.divergence)
    if compare:
        sums |= engine_gaps(scores.logp, micro, len(MISMATCH_EDGES) - 1)
    return loss, sums


# -- before the step ----------------------------------------------------------------------------------------


@dataclass
class EarlyPasses:
    """Backward passes of a step before all its groups are complete."""

    group_ids: set[int] = field(default_factory=set)
    samples: int = 0
    seconds: float = 0.0
    records: list[MicroBatchRecord] = field(default_factory=list)

    def metrics(self, train_batch: TrainBatch) -> dict[str, float]:
        """Return `early_share`, the share of the step's samples, and `time_early`, seconds during the rollout."""
        share = self.samples / sum(len(g.samples) for g in train_batch.groups)
        return {"early_share": share, "time_early": self.seconds}


def backward_early(trainer: Trainer, objective: Objective, part: TrainBatch, early: EarlyPasses) -> None:
    """Run the backward passes of a step's first groups. The update, after the last group, divides by the
    denominator."""
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
    """Score tokens that the current weights sampled, before an update: exact `old` for later steps.

    With trainer.replay = engine it uses the engine's experts, as the step that trains these tokens does. Costs a
    forward pass over the whole sequences, since a token's log-prob depends on all its predecessors.
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
