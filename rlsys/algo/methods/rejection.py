"""Rejection of tokens, responses or groups for which an estimate of KL(mu || anchor) is too large."""

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

RejectionLevel = Literal[
    "token", "sequence_mean", "sequence_sum", "sequence_max", "group_mean", "group_sum", "group_max"
]


class Rejection(CorrectionPlugin):
    """Reject tokens, responses or groups whose estimate of KL(mu || anchor) is outside [low, high].

    The estimate of a token with d = anchor - mu is k1 = -d, k2 = d^2 / 2 or k3 = exp(d) - 1 - d. The estimate of a
    response or group is the mean, sum or maximum over its trained tokens; the correction rejects all its tokens or
    none. For a group, only tokens of this update with an advantage count. The cited code has no group level. Several
    such corrections can be combined.
    """

    paper: ClassVar[str] = "verl, `rollout_rs`; AReaL, `rejection_sampling`; slime, MIS"
    evidence: ClassVar[str] = "R"
    of_anchor: ClassVar[bool] = True
    kind: KlKind = "k3"
    """Estimator of the KL."""
    level: RejectionLevel = "sequence_mean"
    """Aggregation of the estimates: none, or mean, sum or maximum over a response or a group."""
    high: float = 0.01
    """Largest estimate that is not rejected, in nats. For k1 this is the logarithm of verl's bound."""
    low: float | None = None
    """Smallest estimate that is not rejected, in nats; for k1 only, because k2 and k3 are at least 0. null: no
    limit."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.kind != "k1" and self.low is not None:
            raise ValueError(
                f"low = {self.low} with kind = {self.kind}, which is never below 0: expected null"
            )
        if self.kind != "k1" and self.high <= 0:
            raise ValueError(
                f"high = {self.high} with kind = {self.kind}, which is never below 0: expected more than 0"
            )
        if self.low is not None and self.low >= self.high:
            raise ValueError(
                f"low = {self.low}: expected less than high = {self.high}; otherwise all tokens are rejected"
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

    def over_sequences(self, view: View, mask: Tensor) -> Tensor:
        """Return the sum of the estimates over tokens of each sequence, or their maximum for a `max` level, `[S]`.

        Args:
            view: the micro-batch.
            mask: the tokens, `[T]` bool.
        """
        batch, values = view.batch, self.values(view)
        values = torch.where(mask, values, torch.zeros_like(values))
        aggregate = max_by if self.level.endswith("max") else sum_by  # max_by needs values >= 0: not k1
        return aggregate(values, batch.ids, batch.sequences)

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the estimate of each sample's group over the update's tokens of all ranks, `[N]`.

        Return None if `level` is not that of a group.
        """
        if not self.prepares:
            return None
        groups = parts[0].groups
        assert groups is not None, "Objective.finish sets it"
        active = [part.active for part in parts]
        per_sequence = [
            self.over_sequences(View(part, anchor, anchor), mask)
            for part, anchor, mask in zip(parts, anchors, active, strict=True)
        ]
        table = sequence_table(parts, per_sequence, len(groups), reduce)
        index, sizes = group_index(groups.to(table.device))
        if self.level == "group_max":
            return max_by(table.amax(1), index, len(sizes))[index]
        estimate = sum_by(table.sum(1), index, len(sizes))
        if self.level == "group_mean":
            counts = [
                sum_by(mask.double(), p.ids, p.sequences) for mask, p in zip(active, parts, strict=True)
            ]
            tokens = table_sum(counts, [part.rows for part in parts], len(groups), reduce)
            estimate = estimate / sum_by(tokens, index, len(sizes)).clamp(min=1)
        return estimate[index]

    def __call__(self, view: View, update_stats: Any) -> Correction:
        batch = view.batch
        if self.level == "token":
            estimate = self.values(view)
        elif update_stats is not None:
            estimate = batch.expand(update_stats)
        else:
            per_sequence = self.over_sequences(view, batch.keep)
            if self.level == "sequence_mean":
                per_sequence = per_sequence / batch.lengths
            estimate = per_sequence[batch.ids]
        keep = view.keep & (estimate <= self.high)
        if self.low is not None:
            keep = keep & (estimate >= self.low)
        return Correction(torch.ones_like(view.anchor), keep)
