"""What a train step does with its groups: plan -> packed micro-batches -> passes -> advantages -> loss -> optimizer.

Every rank calls every function together, with the same groups.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rlsys.algo.objective import Objective
from rlsys.algo.plan import Plan
from rlsys.obs.metrics import MISMATCH_EDGES, mismatch_summary
from rlsys.trainer.critic import critic_of
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.schedule import learning_rate
from rlsys.trainer.signals import pack_rows, rescore, sample_table, score, shuffled
from rlsys.trainer.trainer import Trainer
from rlsys.types import Taken


@dataclass
class Early:
    """What has gone backward of a step whose groups are not all there yet."""

    group_ids: set[int] = field(default_factory=set)
    samples: int = 0
    seconds: float = 0.0

    def figures(self, taken: Taken) -> dict[str, float]:
        """early_share: of the step's samples. time_early: seconds, all of them while the rollout went on."""
        share = self.samples / sum(len(g.samples) for g in taken.groups)
        return {"early_share": share, "time_early": self.seconds}


def go_backward(trainer: Trainer, objective: Objective, part: Taken, early: Early) -> None:
    """Passes of a step's first groups; the weights stay, and `update` divides by the whole step's denominator."""
    start = time.monotonic()
    plan = objective.plan(sample_table(part.groups, part.train_step, objective.needs))
    for batch in packed(trainer, objective, plan, part, [plan.rows] if plan.rows else []):
        objective.prepare(batch, trainer.sum_over_dp)
        trainer.accumulate(batch, partial(micro_loss, objective))
    early.group_ids |= {g.group_id for g in part.groups}
    early.samples += sum(len(g.samples) for g in part.groups)
    early.seconds += time.monotonic() - start


def update(
    trainer: Trainer, objective: Objective, taken: Taken, early: Early | None = None
) -> dict[str, object]:
    """One train step on the groups taken, of which some may have gone backward. Returns its metrics."""
    objective.start(trainer.named_parameters())
    step, groups = taken.train_step, taken.groups
    plan = objective.plan(sample_table(groups, step, objective.needs))
    stats: dict[str, object] = {"effective_groups": len({int(plan.samples.group_ids[r]) for r in plan.rows})}
    gone = set() if early is None else early.group_ids
    if early is not None:
        stats |= early.figures(taken)
    sums: dict[str, Tensor] = {}
    if plan.rows:  # else every group's rewards are equal: nothing to learn
        rest = [r for r in plan.rows if int(plan.samples.group_ids[r]) not in gone]
        updates = shuffled(rest, trainer.config.algo.minibatches, (trainer.config.run.seed, step))
        epochs = trainer.config.algo.epochs
        stats |= optimise(trainer, objective, plan, taken, updates, sums, epochs)
    if later := objective.put_off(
        plan, groups, step
    ):  # a selector's rest of earlier steps, in an extra update
        again, advantages = replace(taken, groups=[g for g, _ in later]), torch.tensor([a for _, a in later])
        plan = objective.plan_again(sample_table(again.groups, step, objective.needs), advantages)
        stats |= {"replayed": len(later), **optimise(trainer, objective, plan, again, [plan.rows], sums)}
    metrics = objective.metrics(sums) if sums else {}
    objective.after_version(trainer.named_parameters(), metrics.get("active_share", 1.0))
    if not sums:
        return stats
    stats |= metrics
    for name in ("mismatch", "mismatch_kept"):
        stats |= mismatch_summary(sums[f"{name}_counts"].tolist(), float(sums[name]), name)
    return stats


def optimise(
    trainer: Trainer,
    objective: Objective,
    plan: Plan,
    taken: Taken,
    updates: Sequence[list[int]],
    sums: dict[str, Tensor],
    epochs: int = 1,
) -> dict[str, object]:
    """An optimizer update for each list of rows; none: all have gone backward early, and one update applies that.

    Further `epochs` go over the same lists in the same order, with the advantages and the scores of the first: of the
    passes, only `now` is made again. A critic of its own learns first; in its warm-up it alone does, and nothing is
    added. Adds to `sums`; returns the last update's figures.
    """
    stats: dict[str, object] = {}
    batches = packed(trainer, objective, plan, taken, updates)
    t, skipped = trainer.config.trainer, 0
    lr = learning_rate(t, taken.train_step, t.schedule, t.lr_end)
    one_pass = list(zip(updates or [[]], batches or [[]], strict=True))
    for i, (rows, batch) in enumerate(one_pass * epochs):
        if i:
            rescore(batch, objective, trainer)
        objective.prepare(batch, trainer.sum_over_dp)
        share = plan.denominator / max(1, len(updates))
        learned: dict[str, object] = {}
        if (critic := critic_of(trainer, objective)) is not None:
            learned = critic.improve(objective, batch, lr, share)
            if taken.train_step <= critic.warmup_steps:
                stats = learned
                continue
        rate = lr * objective.lr_factor(plan, rows)
        result = trainer.train_step(batch, partial(micro_loss, objective), rate, denominator=share)
        skipped += result.skipped
        objective.after_step(trainer.named_parameters(), objective.metrics(result.sums))
        figures = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": rate, "skipped_updates": skipped}
        stats = {**learned, **figures, "padding_share": result.padding_share, **result.routing}
        for name, value in result.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    return stats


def packed(
    trainer: Trainer, objective: Objective, plan: Plan, taken: Taken, updates: Sequence[list[int]]
) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each update, with the passes, advantages and weights that they need."""
    batches = [pack_rows(taken, rows, trainer) for rows in updates]
    if batches:
        score(batches, objective, trainer)
        objective.finish(plan, [micro for batch in batches for micro in batch], trainer.sum_over_dp)
    return batches


def micro_loss(objective: Objective, scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum of one packed micro-batch, and sums for the metrics."""
    loss, sums = objective(scores.logp, micro, scores.entropy, scores.values)
    gaps = (scores.logp.detach() - micro.mu).abs()
    for name, tokens in (("mismatch", micro.comparable), ("mismatch_kept", micro.carried_over)):
        gap = gaps[tokens]
        sums[name] = gap.sum()
        sums[f"{name}_counts"] = torch.histc(gap.clamp(min=1e-12).log10(), len(MISMATCH_EDGES) - 1, -12, 2)
    return loss, sums
