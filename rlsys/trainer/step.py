"""One train step, in the order in which it is read:

    plan        a table with a row per sample; which rows are trained, and in which optimizer update
    pack        this rank's micro-batches of each update
    score       what the objective asks for: log-probs (old, reference, averages), values of a critic, a teacher's
    advantages  and the weight of every token
    loss        of each micro-batch, and its gradient
    update      the optimizer's, once for each list of micro-batches

`take` comes before it and the push after it, in rlsys.train. What each stage computes is the objective's business
(rlsys.algo.objective); where it is computed is the trainer's. Every rank calls every function together, with the same
groups, and gets the same table. Shapes: T tokens of a micro-batch.
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
from rlsys.trainer.pack import MicroBatch, Unread
from rlsys.trainer.teacher import Teachers
from rlsys.trainer.token_log import Noted
from rlsys.trainer.trainer import Trainer, learning_rate


def train_step(
    trainer: Trainer,
    objective: Objective,
    taken: TrainBatch,
    early: Early | None = None,
    notes: list[Noted] | None = None,
) -> dict[str, object]:
    """Train on the groups taken, of which some may have gone backward early. Returns the step's metrics; adds to
    `notes`."""
    step, config = taken.train_step, trainer.config
    sums: dict[str, Tensor] = {}
    notes = [] if notes is None else notes

    table = sample_table(taken.groups, step, objective.asks.needs)
    objective.start(trainer.named_parameters)
    plan = objective.plan(table)
    metrics: dict[str, object] = {}
    gone = set[int]() if early is None else early.group_ids
    if early is not None:
        metrics |= early.metrics(taken)
    if plan.rows:  # else every group's rewards are equal: nothing to learn
        rest = [r for r in plan.rows if int(plan.samples.group_ids[r]) not in gone]
        updates = shuffled(rest, config.algo.minibatches, (config.run.seed, step))
        metrics |= learn(trainer, objective, plan, taken, updates, sums, config.algo.epochs, notes=notes)
    metrics["effective_groups"] = len({int(plan.samples.group_ids[r]) for r in plan.trained})

    # What a selector put off in earlier steps and is due now gets an update of its own.
    if due := objective.put_off(plan, taken.groups, step, partial(load_with_routes, trainer.segments)):
        again = replace(taken, groups=[group for group, _ in due])
        table = sample_table(again.groups, step, objective.asks.needs)
        plan = objective.plan_again(table, torch.tensor([advantage for _, advantage in due]))
        metrics |= {
            "replayed": len(due),
            **learn(trainer, objective, plan, again, [plan.rows], sums),
        }

    of_loss = loss_metrics(sums, objective.asks.needs) if sums else {}
    objective.after_version(trainer.named_parameters, of_loss.get("active_share", 1.0))
    for name in ("mismatch", "mismatch_kept") if "mismatch" in sums else ():
        if compared := int(sums[f"{name}_counts"].sum()):
            hist = [int(n) for n in sums[f"{name}_counts"]]
            metrics |= {f"{name}_mean": float(sums[name]) / compared, f"{name}_hist": hist}
    return metrics | of_loss


def learn(
    trainer: Trainer,
    objective: Objective,
    plan: StepPlan,
    taken: TrainBatch,
    updates: Sequence[list[int]],
    sums: dict[str, Tensor],
    epochs: int = 1,
    *,
    notes: list[Noted] | None = None,
) -> dict[str, object]:
    """An optimizer update for each list of rows; none: all have gone backward early, and one update applies that.
    A list without a token that has a gradient gets none.

    Further `epochs` go over the same lists in the same order, with the advantages and the scores of the first: of the
    passes, only `now` is made again. A critic of its own learns first; in its warm-up it alone does, and nothing is
    added. Adds to `sums` and to `notes`; returns the last update's figures. `notes`: None when an update of this step
    came before.
    """
    figures: dict[str, object] = {}
    samples = [s for group in taken.groups for s in group.samples]
    several = parts_of_samples(objective, samples, plan.rows)
    batches = ready(trainer, objective, plan, taken, updates)
    trained = [objective.trains(batch, trainer.passes.sum_over_dp) for batch in batches]

    t, skipped = trainer.config.trainer, 0
    critic = trainer.critic if objective.critic is not None else None
    assert critic is None or isinstance(critic, Critic)
    share = plan.denominator / max(1, len(updates))
    one_pass = [pair for pair, has in zip(zip(updates, batches, strict=True), trained, strict=True) if has]
    one_pass = one_pass if batches else [([], [])]
    for i, (rows, batch) in enumerate(one_pass * epochs):
        if i and (
            "now" in objective.asks.passes or several
        ):  # the weights have moved since the scores were made
            for micro, logp in zip(batch, trainer.passes.logprobs(batch), strict=True):
                micro.now = logp
        if objective.asks.prepares or several:
            objective.prepare(batch, trainer.passes.sum_over_dp, several=several)
        factor = objective.lr_factor(plan, rows) if objective.hooks else 1.0
        rate = learning_rate(t, taken.train_step, t.schedule, t.lr_end)
        first, noted = notes is not None and i == 0, notes if i < len(one_pass) else None
        loss = partial(micro_loss, objective, compare=first, notes=noted, samples=samples)
        of_critic: dict[str, object] = {}
        if critic is not None:
            of_critic = critic.improve(objective, batch, rate, share)
            if taken.train_step <= critic.warmup_steps:
                figures = of_critic
                continue

        lr = rate * factor
        done = trainer.update(batch, loss, lr, denominator=share)
        objective.after_step(trainer.named_parameters, loss_metrics(done.sums, objective.asks.needs))

        skipped += done.skipped
        figures = {
            **of_critic, "loss": done.loss, "grad_norm": done.grad_norm, "lr": lr, "skipped_updates": skipped,
            "padding_share": done.padding_share, "shared_share": done.shared_share, **done.routing, **done.prediction,
        }  # fmt: skip
        for name, value in done.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    return figures


def parts_of_samples(objective: Objective, samples: Sequence[Sample], rows: Sequence[int]) -> bool:
    """Whether a plug-in takes something over whole samples, and one of them may be in several micro-batches."""
    return objective.asks.whole_samples and any(len(samples[r].trained_sequences) > 1 for r in rows)


def ready(
    trainer: Trainer, objective: Objective, plan: StepPlan, taken: TrainBatch, updates: Sequence[list[int]]
) -> list[list[MicroBatch]]:
    """pack, score, advantages: this rank's micro-batches of each update, with all that their loss needs."""
    asks, passes, config = objective.asks, trainer.passes, trainer.config
    batches = [pack_rows(taken, rows, trainer) for rows in updates]
    if not batches:
        return batches

    # All passes come before the first update, or later ones would score their own past. The first update begins with
    # the weights that score, so that its own log-probs are `old`, unless somebody wants them earlier. The experts
    # that a scoring pass chooses (trainer.replay = trainer) are wanted earlier; and with further epochs these samples
    # come again, when the weights have moved.
    own_experts = config.trainer.replay == "trainer"
    several = parts_of_samples(objective, [s for group in taken.groups for s in group.samples], plan.rows)
    reuse = not (asks.looks_ahead or own_experts or config.algo.epochs > 1 or several)
    for i, batch in enumerate(batches if asks.scored & asks.current or own_experts or several else ()):
        scores = [None] * len(batch) if reuse and i == 0 else passes.score(batch)
        for micro, found in zip(batch, scores, strict=True):
            before = torch.full_like(micro.mu, torch.nan) if micro.behaviour is None else micro.behaviour
            if found is None:
                micro.old_is_current = True
            else:
                micro.old = micro.now = found.logp
                micro.entropy, micro.values = found.entropy, found.values
                micro.sum_pi_squared = found.sum_pi_squared
                before = torch.where(micro.versions == micro.version, found.logp, before)
            if "behaviour" in asks.passes:
                micro.behaviour = before
    if asks.passes & OTHERS:
        score_with_others(batches, objective, trainer)

    objective.finish(plan, [micro for batch in batches for micro in batch], passes.sum_over_dp)
    return batches


# -- plan ---------------------------------------------------------------------------------------------------


def sample_table(groups: Sequence[SampleGroup], train_step: int, needs: Collection[str]) -> Samples:
    """One row per sample of the step, in the order of its groups; of the optional columns, those in `needs`."""
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
    """Rewards of turns, and what goes with them. Raises UserError where nobody has said them."""
    marks = [s.turn_rewards for s in samples]
    if missing := [s.sample_id for s in samples if s.turn_rewards is None]:
        raise UserError(
            f"algo: sample {missing[0]} has no rewards of its turns, which a plug-in needs; expected "
            "rollout.generator = environment, or a data.reward that gives turn_rewards beside the score"
        )
    counts = torch.tensor([len(m or ()) for m in marks])
    shape = len(samples), max(1, int(counts.max()))
    rewards, matches = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for row, found in enumerate(marks):
        for turn, mark in enumerate(found or ()):
            rewards[row, turn], matches[row, turn] = mark.reward, mark.matched
    return {"turn_rewards": rewards, "turn_matches": matches, "turn_counts": counts}


def answer_id(answer: str | None) -> int:
    """The same number for the same answer in every process, of 24 bits, which float32 holds; -1 for none."""
    return -1 if answer is None else zlib.crc32(answer.encode()) & 0xFFFFFF


def shuffled(rows: Sequence[int], parts: int, seed: tuple[int, int]) -> list[list[int]]:
    """Rows in random order, dealt to at most `parts` lists that are not empty. `seed`: (run.seed, train step)."""
    generator = torch.Generator().manual_seed(seed[0] * 1_000_003 + seed[1])
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [dealt for k in range(parts) if (dealt := [rows[i] for i in order[k::parts]])]


# -- pack ---------------------------------------------------------------------------------------------------


def pack_rows(taken: TrainBatch, rows: Sequence[int], trainer: Trainer) -> list[MicroBatch]:
    """This rank's micro-batches of these rows of the sample table."""
    samples, layers = [s for group in taken.groups for s in group.samples], trainer.replayed_layers
    unread = []
    for row in rows:
        sequences = samples[row].trained_sequences
        first_turns = accumulate((len(q.turns()) for q in sequences[:-1]), initial=0)
        unread += [
            Unread(q, row, trainer.segments, layers, n) for q, n in zip(sequences, first_turns, strict=False)
        ]
    batch = trainer.passes.pack(unread)
    teachers = None
    if taken.sources and isinstance(trainer.teacher, Teachers):
        places = [trainer.teacher.place(source) for source in taken.sources]
        each = [place for place, g in zip(places, taken.groups, strict=True) for _ in g.samples]
        teachers = torch.tensor(each, dtype=torch.float32)
    for micro in batch:
        micro.version, micro.teachers = taken.weight_version, teachers
    return batch


# -- score --------------------------------------------------------------------------------------------------


OTHERS = frozenset({"values", "divergence", "ref", "ewma"})
"""Signals that other models give, or this one with other weights."""


def score_with_others(batches: Sequence[list[MicroBatch]], objective: Objective, trainer: Trainer) -> None:
    """The passes of other models, and of other weights in this one: critic, teacher, reference, averages."""
    passes = objective.asks.passes
    if "values" in passes and objective.critic is not None:
        assert isinstance(trainer.critic, Critic), "add_critic comes before the first step"
        trainer.critic.score_values(batches)
    if "divergence" in passes and trainer.teacher is None:  # an engine was asked, and the samples have it
        if any(micro.teacher_ids is None for batch in batches for micro in batch):
            raise RunError("a sample of the step has no log-probs of algo.teacher.engine")
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
    notes: list[Noted] | None = None,
    samples: Sequence[Sample] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum of one packed micro-batch, and sums for the metrics.

    `compare`: the weights are still those that start the step, so that log-probs must be those of the engine. After
    an update the same difference says how far the weights have moved. `notes`: gets what people may read of the
    tokens; `samples`: the rows of the sample table.
    """
    if notes is not None and micro.mask.any():  # else it fills a bin, and is trained elsewhere
        logp = scores.logp if compare else micro.old
        figures = [None if v is None else v.detach().cpu() for v in (logp, micro.advantages)]
        notes.append(Noted(samples, micro.rows.tolist(), micro.places, micro.cu_seqlens.tolist(), *figures))
    loss, sums = objective(scores.logp, micro, scores.entropy, scores.values, scores.divergence)
    if compare:
        sums |= engine_gaps(scores.logp, micro, len(MISMATCH_EDGES) - 1)
    return loss, sums


# -- before the step ----------------------------------------------------------------------------------------


@dataclass
class Early:
    """What has gone backward of a step whose groups are not all there yet."""

    group_ids: set[int] = field(default_factory=set)
    samples: int = 0
    seconds: float = 0.0
    notes: list[Noted] = field(default_factory=list)

    def metrics(self, taken: TrainBatch) -> dict[str, float]:
        """early_share: of the step's samples. time_early: seconds, all of them while the rollout went on."""
        share = self.samples / sum(len(g.samples) for g in taken.groups)
        return {"early_share": share, "time_early": self.seconds}


def go_backward(trainer: Trainer, objective: Objective, part: TrainBatch, early: Early) -> None:
    """Passes of a step's first groups; the weights stay, and the step divides by the whole step's denominator."""
    start = time.monotonic()
    plan = objective.plan(sample_table(part.groups, part.train_step, objective.asks.needs))
    samples = [s for group in part.groups for s in group.samples]
    several = parts_of_samples(objective, samples, plan.rows)
    for batch in ready(trainer, objective, plan, part, [plan.rows] if plan.rows else []):
        if several:
            objective.prepare(batch, trainer.passes.sum_over_dp, several=True)
        loss = partial(micro_loss, objective, compare=True, notes=early.notes, samples=samples)
        trainer.passes.accumulate(batch, loss)
    early.group_ids |= {g.group_id for g in part.groups}
    early.samples += sum(len(g.samples) for g in part.groups)
    early.seconds += time.monotonic() - start


def score_parked(unscored: Sequence[LogProbRequest], trainer: Trainer) -> list[LogProbResult]:
    """Log-probs of tokens that the resident weights sampled, before these change: exact `old` for later steps.

    With trainer.replay = engine it takes the engine's experts, as the step will that trains these tokens.
    Costs a forward pass over the whole sequences, since a token's log-prob needs all that is before it.
    """
    if not unscored:
        return []
    layers = trainer.replayed_layers
    batch = trainer.passes.pack(
        [Unread(u.sample, row, trainer.segments, layers) for row, u in enumerate(unscored)]
    )
    mine: dict[int, list[float]] = {}
    for micro, logp in zip(batch, trainer.passes.logprobs(batch), strict=True):
        ends = micro.cu_seqlens[1:].tolist()
        for row, end in zip(micro.rows.tolist(), ends, strict=True):
            tokens = unscored[row].sample.tokens - unscored[row].start
            mine[row] = logp[end - tokens : end].tolist()
    found = {row: logp for part in trainer.from_all(mine) for row, logp in part.items()}
    return [
        LogProbResult(u.sample.sample_id, u.start, found[row], u.sample.sequence)
        for row, u in enumerate(unscored)
    ]
