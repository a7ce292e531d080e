"""Rejection of tokens, responses or groups whose sampling policy is too far from the anchor, by an estimate of KL."""

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
    """Reject tokens, responses or groups whose estimate of KL(mu || anchor) is outside [low, high].

    With d = anchor - mu of a token: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. The estimate is the token's own, or
    the mean, sum or maximum over the trained tokens of its response or group; a response or group is then rejected
    as a whole. For a group, only tokens with an advantage in this update count. Several such corrections can be
    combined. The group level is not in the cited code.
    """

    paper: ClassVar[str] = "verl, `rollout_rs`; AReaL, `rejection_sampling`; slime, MIS"
    evidence: ClassVar[str] = "R"
    of_anchor: ClassVar[bool] = True
    kind: KlKind = "k3"
    """Estimator."""
    level: Of = "sequence_mean"
    """Unit of the estimate."""
    high: float = 0.01
    """Largest value kept. For k1 it is in nats, the logarithm of the bound of a ratio in verl."""
    low: float | None = None
    """Smallest value kept, for k1 only: k2 and k3 are never negative."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.kind != "k1" and self.low is not None:
            raise ValueError(f"low = {self.low} bounds k1 only: {self.kind} is never below 0")
        if self.kind != "k1" and self.high <= 0:
            raise ValueError(f"high = {self.high} must be above 0: {self.kind} is never below 0")
        if self.low is not None and self.low >= self.high:
            raise ValueError(
                f"low = {self.low}: expected less than high = {self.high}; no token would be kept"
            )
        if self.kind == "k1" and self.level.endswith("max"):
            raise ValueError(
                f"level = {self.level!r} with kind = k1: the maximum ignores negative values; use another level or "
                "kind"
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
        """Return the sum, or for a `max` level the maximum, over the `tokens` `[T]` bool of each sequence, `[S]`."""
        batch, values = view.batch, self.values(view)
        values = torch.where(tokens, values, torch.zeros_like(values))
        by = max_by if self.level.endswith("max") else sum_by  # only k1 has values below 0, and it has no max
        return by(values, batch.ids, batch.sequences)

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the statistic of each row's group over this update's sequences of all ranks, `[N]`.

        None if the level is not that of a group.
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
