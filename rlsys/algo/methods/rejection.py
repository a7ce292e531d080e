"""Reject tokens, responses or whole groups whose policy is too far from the anchor, by an estimate of KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.corrections import Correction, CorrectionPlugin
from rlsys.algo.kl import KlKind
from rlsys.algo.losses import View
from rlsys.algo.reduction import Reduce, table_sum
from rlsys.algo.segments import group_index, max_by, sum_by
from rlsys.algo.sequences import sequence_table

Of = Literal["token", "sequence_mean", "sequence_sum", "sequence_max", "group_mean", "group_sum", "group_max"]


class Rejection(CorrectionPlugin):
    """Reject what lies outside [low, high] of an estimate of KL(mu || anchor), with d = anchor - mu of each token.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, of the token itself, or their mean, sum or largest over the trained
    tokens of its response or of its group. A response or a group stays or goes as a whole; of a group, those tokens
    of the update count that have an advantage. Several such corrections apply together. The level of a group is not
    in the paper.
    """

    paper: ClassVar[str] = "verl, `rollout_rs`; AReaL, `rejection_sampling`; slime, MIS"
    evidence: ClassVar[str] = "R"
    of_anchor: ClassVar[bool] = True
    kind: KlKind = "k3"
    """Estimator."""
    level: Of = "sequence_mean"
    """Unit of the estimate."""
    high: float = 0.01
    """Largest value kept. For k1 in nats: verl gives bounds of a ratio, whose logarithms these are."""
    low: float | None = None
    """Smallest value kept; k1 only, whose values have a sign."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.kind != "k1" and self.low is not None:
            raise ValueError(f"low = {self.low} bounds k1 only: {self.kind} is never below 0")
        if self.kind != "k1" and self.high <= 0:
            raise ValueError(f"high = {self.high} must be above 0: {self.kind} is never below 0")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}: nothing would be kept")
        if self.kind == "k1" and self.level.endswith("max"):
            raise ValueError(
                f"level = {self.level!r} with kind = k1: values of both signs have no largest one; "
                "use another level or kind"
            )
        return self

    @property
    def prepares(self) -> bool:
        return self.level.startswith("group")

    def values(self, view: View) -> Tensor:
        """Return the estimate of each token, `[T]`; 0 where masked."""
        gap = view.log_behaviour_ratio
        if self.kind == "k1":
            return -gap
        return gap**2 / 2 if self.kind == "k2" else gap.exp() - 1 - gap

    def over_sequences(self, view: View, tokens: Tensor) -> Tensor:
        """Sum, or maximise if the level says so, over these tokens `[T]` bool of each sequence, `[S]`."""
        batch, values = view.batch, self.values(view)
        values = torch.where(tokens, values, torch.zeros_like(values))
        by = max_by if self.level.endswith("max") else sum_by  # only k1 has values below 0, and it has no max
        return by(values, batch.ids, batch.sequences)

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the statistic of each row's group, `[N]`, from this update's sequences of all ranks.

        None: no groups.
        """
        if not self.prepares:
            return None
        groups = parts[0].groups
        assert groups is not None, "Objective.finish sets it"
        views = [View(part, anchor, anchor) for part, anchor in zip(parts, anchors, strict=True)]
        active = [part.active for part in parts]
        rows = [part.rows for part in parts]
        over = [self.over_sequences(v, tokens) for v, tokens in zip(views, active, strict=True)]
        counts = [sum_by(t.double(), p.ids, p.sequences) for t, p in zip(active, parts, strict=True)]
        table = sequence_table(parts, over, len(groups), reduce)
        of_rows = table.amax(1) if self.level == "group_max" else table.sum(1)
        index, sizes = group_index(groups.to(table.device))
        by = max_by if self.level == "group_max" else sum_by
        statistic = by(of_rows, index, len(sizes))
        if self.level == "group_mean":
            tokens = table_sum(counts, rows, len(groups), reduce)
            statistic = statistic / sum_by(tokens, index, len(sizes)).clamp(min=1)
        return statistic[index]

    def __call__(self, view: View, update_stats: Any) -> Correction:
        batch = view.batch
        if self.level == "token":
            statistic = self.values(view)
        elif update_stats is not None:
            statistic = batch.expand(update_stats)
        else:
            over = self.over_sequences(view, batch.keep)
            statistic = (over / batch.lengths if self.level == "sequence_mean" else over)[batch.ids]
        keep = view.keep & (statistic <= self.high)
        if self.low is not None:
            keep = keep & (statistic >= self.low)
        return Correction(torch.ones_like(view.anchor), keep)
