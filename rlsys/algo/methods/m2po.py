"""M2PO: second-moment trust policy optimisation.

The search for the bound reads `current`, the log-probs just before the update, for all tokens of the update. It uses
only sums over all ranks. It does not use the signs of log-ratios that may be rounding errors, which differ between
CPUs and layouts.
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
"""Absolute log-ratio below which the sign may be a rounding error."""


def largest_kept(squares: Sequence[Tensor], budget: float, reduce: Reduce) -> float:
    """Return the largest bound for which the mean of the squares up to the bound is at most `budget`.

    Args:
        squares: `[n]` for each micro-batch of this rank.
        budget: the budget.
        reduce: sum over ranks.
    """

    def within_budget(edges: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        return sums <= budget * counts.clamp(min=1)

    return threshold(squares, within_budget, 0.0, LOG_RATIO_LIMIT**2, reduce)


def largest_cap(squares: Sequence[Tensor], tokens: Tensor, budget: float, reduce: Reduce) -> float:
    """Return the largest cap c with sum(min(square, c^2)) <= budget * tokens; LOG_RATIO_LIMIT if no cap is needed.

    Args:
        squares: `[n]` for each micro-batch of this rank.
        tokens: this rank's share of the number of tokens, a float64 scalar.
        budget: the budget.
        reduce: sum over ranks.
    """
    count = tokens.new_tensor(float(sum(len(s) for s in squares)))
    total_count, total_tokens = reduce(torch.stack([count, tokens])).cpu()

    def within_budget(edges: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        return sums + edges * (total_count - counts) <= budget * total_tokens.clamp(min=1)

    return math.sqrt(threshold(squares, within_budget, 0.0, LOG_RATIO_LIMIT**2, reduce))


class M2PO(Loss):
    """A budget for the second moment of the log-ratio D = current - anchor, instead of a clip of each token.

    - `form: mask` (the paper): the tokens with the largest D^2 are dropped until the mean over the others is at most
      tau. The others have the loss -r A.
    - `form: bounds` (the authors' code): if the mean of D^2 over the tokens with A D > 0 exceeds tau, all ratios are
      clipped to [exp(-c), exp(c)], where c is the largest cap for which the mean of min(|D|, c)^2 is at most tau.

    rlsys computes the means over the whole update on all ranks, the authors' code for each micro-batch. Tokens with
    advantage 0 are excluded, because other loss terms determine whether they are packed.

    With `bounds`, a token with |D| < 0.001 counts in the divisor as (1 + sign(A D) (D / 0.001)^2) / 2, which is near
    one half. The authors' code counts it as 1 if A D > 0 and else as 0. For tokens on which engine and trainer agree,
    this depends on rounding, and differs between machines.
    """

    paper: ClassVar[str] = "M2PO: second-moment trust policy optimisation"
    evidence: ClassVar[str] = "R"
    tau: Annotated[float, Field(gt=0)] = 0.04
    """Budget of the second moment."""
    form: Literal["bounds", "mask"] = "bounds"
    """Form of the method. bounds: clip as in the authors' code. mask: drop tokens as in the paper."""
    floor_low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Smallest clip width below a ratio of 1, for `form: bounds`; null: no minimum."""
    floor_high: Annotated[float, Field(ge=0)] | None = None
    """Smallest clip width above a ratio of 1, for `form: bounds`; null: no minimum."""

    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the largest D^2 without a mask, or for `form: bounds` the lower and upper bound of the ratio."""
        deltas = log_ratios(parts, anchors)
        if self.form == "mask":
            squares = [d[p.active] ** 2 for d, p in zip(deltas, parts, strict=True)]
            return largest_kept(squares, self.tau, reduce)
        signed_deltas = [
            (d * p.signal("advantages").sign())[p.active].double() for d, p in zip(deltas, parts, strict=True)
        ]
        scaled = [(signed / NOISE).clamp(-1, 1) for signed in signed_deltas]
        tokens = torch.stack([((1 + x * x.abs()) / 2).sum() for x in scaled]).sum()
        cap = largest_cap([signed[signed > 0] ** 2 for signed in signed_deltas], tokens, self.tau, reduce)
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
