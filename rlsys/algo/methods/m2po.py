"""M2PO: second-moment trust policy optimisation.

Needs `current`, the log-probs just before the update, for a pass over all tokens before the backward pass. The
decision is a function of sums over all ranks, and does not depend on the signs of log-ratios that are only rounding:
another CPU or another layout rounds differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.losses import (
    LOG_RATIO_LIMIT,
    Figures,
    Loss,
    View,
    clipped_surrogate,
    gradient_is_clipped,
    log_ratios,
)
from rlsys.algo.reduction import Reduce, threshold

NOISE = 1e-3
"""Absolute log-ratio below which the sign may be due to rounding."""


def largest_kept(squares: Sequence[Tensor], budget: float, reduce: Reduce) -> float:
    """Return the largest of the squares that remain if the largest are dropped until the mean is within `budget`."""

    def holds(edges: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        return sums <= budget * counts.clamp(min=1)

    return threshold(squares, holds, 0.0, LOG_RATIO_LIMIT**2, reduce)


def largest_cap(squares: Sequence[Tensor], tokens: Tensor, budget: float, reduce: Reduce) -> float:
    """Return the largest cap c with sum(min(square, c^2)) <= budget * tokens; LOG_RATIO_LIMIT if no cap is needed.

    Args:
        squares: `[n]` of each part.
        tokens: float64 scalar, this rank's part of the number of tokens in the mean.
        budget: the budget.
        reduce: sum over ranks.
    """
    total, n = reduce(torch.stack([tokens.new_tensor(float(sum(len(s) for s in squares))), tokens])).cpu()

    def holds(edges: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        return sums + edges * (total - counts) <= budget * n.clamp(min=1)

    return math.sqrt(threshold(squares, holds, 0.0, LOG_RATIO_LIMIT**2, reduce))


class M2PO(Loss):
    """A budget for the second moment of the log-ratio instead of a clip on each token, for stale data.

    D = current - anchor. `mask` (the paper): drop the tokens of largest D^2 until the mean of the others is at most
    tau; the others have the loss -r A. `bounds` (the authors' code): over the tokens where a trust region can act (A
    > 0 and D > 0, or A < 0 and D < 0), if the mean of D^2 exceeds tau, find the largest cap c for which the mean of
    min(|D|, c)^2 is at most tau, and clip every ratio to [exp(-c), exp(c)]. rlsys computes it over the whole update
    and all ranks, the authors' code per micro-batch. Tokens of advantage 0 are excluded, because other terms of the
    loss determine whether they are packed.

    The divisor of `bounds` counts a token with |D| < 0.001 as one half, plus or minus (D / 0.001)^2 / 2 by its sign.
    For tokens on which engine and trainer agree, the authors' code counts those whose rounding has the right sign:
    also about half, but different ones on each machine.
    """

    paper: ClassVar[str] = "M2PO: second-moment trust policy optimisation"
    evidence: ClassVar[str] = "R"
    tau: Annotated[float, Field(gt=0)] = 0.04
    """Budget of the second moment."""
    form: Literal["bounds", "mask"] = "bounds"
    """bounds: as in the authors' code. mask: as in the paper."""
    floor_low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """With bounds: the lower clip is at most 1 - floor_low."""
    floor_high: Annotated[float, Field(ge=0)] | None = None
    """With bounds: the upper clip is at least 1 + floor_high."""

    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        deltas = log_ratios(parts, anchors)
        if self.form == "mask":
            squares = [d[p.active] ** 2 for d, p in zip(deltas, parts, strict=True)]
            return largest_kept(squares, self.tau, reduce)
        bites = [
            (d * p.signal("advantages").sign())[p.active].double() for d, p in zip(deltas, parts, strict=True)
        ]
        near = [(b / NOISE).clamp(-1, 1) for b in bites]
        tokens = torch.stack([((1 + x * x.abs()) / 2).sum() for x in near]).sum()
        cap = largest_cap([b[b > 0] ** 2 for b in bites], tokens, self.tau, reduce)
        low = math.exp(-cap) if self.floor_low is None else min(math.exp(-cap), 1 - self.floor_low)
        high = math.exp(cap) if self.floor_high is None else max(math.exp(cap), 1 + self.floor_high)
        return low, high

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        if self.form == "mask":
            delta = view.batch.masked(view.batch.signal("current") - view.anchor).clamp(
                -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
            )
            inside = delta**2 <= update_stats
            return -view.ratio * view.advantages * inside, {"clipped": ~inside}
        clipped = gradient_is_clipped(view.ratio.detach(), view.advantages, *update_stats)
        return clipped_surrogate(view.ratio, view.advantages, *update_stats), {"clipped": clipped}
