"""BAPO: balanced policy optimisation with adaptive clipping.

The search for the bounds reads `current`, the log-probs just before the update, for all tokens of the update. It uses
only sums over all ranks. It does not use the signs of log-ratios, because these may be rounding errors, which differ
between CPUs and layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.losses import Figures, Loss, View, clipped_surrogate, gradient_is_clipped, log_ratios
from rlsys.algo.reduction import Reduce

MAX_BOUNDS = 10_000
"""Largest number of pairs of bounds that one update compares. Each is a column of a table on every rank."""


TIE = 1e-9
"""Relative difference below which two float64 sums count as equal, because layouts add in different orders."""


class Bapo(Loss):
    """PPO's clip with bounds that are raised until positive samples contribute their share of the loss.

    With C+ = sum_{A >= 0} min(r, high) A and C- = sum_{A < 0} max(r, low) |A|, the search starts at the smallest
    bounds and raises `low` to its maximum, then `high`, until C+ / C- reaches `target`. The sums are those of the
    authors' code. In them a higher `low` makes C- larger, because it removes the gradient of negative tokens but not
    their share of the sum. A `target` of 1 corresponds to the paper's share of one half; the authors' script uses
    0.5.
    """

    paper: ClassVar[str] = "BAPO: balanced policy optimisation with adaptive clipping"
    evidence: ClassVar[str] = "R"
    low_min: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Initial lower bound of the ratio."""
    low_max: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Maximum of the lower bound."""
    high_min: Annotated[float, Field(ge=1)] = 1.2
    """Initial upper bound of the ratio."""
    high_max: Annotated[float, Field(ge=1)] = 3.0
    """Maximum of the upper bound."""
    step: Annotated[float, Field(gt=0)] = 0.05
    """Increase of a bound per step of the search."""
    target: Annotated[float, Field(ge=0)] = 1.0
    """Target of C+ / C-."""
    dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Largest ratio with a gradient where the advantage is negative (dual clip)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for side, start, end in (
            ("low", self.low_min, self.low_max),
            ("high", self.high_min, self.high_max),
        ):
            if start > end:
                raise ValueError(f"{side}_min = {start}: expected at most {side}_max = {end}")
        bounds = (self.low_max - self.low_min + self.high_max - self.high_min) / self.step
        if bounds > MAX_BOUNDS:
            raise ValueError(
                f"step = {self.step} gives {bounds:.3g} bounds to compare; expected at most {MAX_BOUNDS}"
            )
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    def path(self) -> list[tuple[float, float]]:
        """Return the pairs (low, high) that the search compares, in order."""
        lows = _grid(self.low_min, self.low_max, self.step)
        highs = _grid(self.high_min, self.high_max, self.step)
        return [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the first pair (low, high) of the path at which C+ / C- reaches the target, or the last pair."""
        path = self.path()
        lows, highs = (torch.tensor(side, dtype=torch.float64) for side in zip(*path, strict=True))
        sums = torch.zeros(2, len(path), dtype=torch.float64, device=parts[0].mu.device)
        for part, delta in zip(parts, log_ratios(parts, anchors), strict=True):
            is_counted = part.counted_tokens
            ratio = delta.double().exp()[is_counted]
            advantages = part.signal("advantages").double()[is_counted]
            positive = advantages >= 0
            below, weight_below = sums_below(ratio[positive], advantages[positive], highs)
            sums[0] += below + highs.to(ratio) * (advantages[positive].sum() - weight_below)
            negative = advantages < 0
            below, weight_below = sums_below(ratio[negative], -advantages[negative], lows)
            sums[1] += lows.to(ratio) * weight_below + (ratio[negative] * -advantages[negative]).sum() - below
        positive_sum, negative_sum = reduce(sums).cpu()
        reaches_target = (positive_sum >= self.target * negative_sum * (1 - TIE)).tolist()
        return path[reaches_target.index(True)] if True in reaches_target else path[-1]

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        bounds = (*update_stats, self.dual)
        clipped = gradient_is_clipped(view.ratio.detach(), view.advantages, *bounds)
        return clipped_surrogate(view.ratio, view.advantages, *bounds), {"clipped": clipped}


def sums_below(values: Tensor, weights: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of value * weight and the sum of weight over the values <= each edge, `[E]` each.

    Args:
        values: `[n]`.
        weights: weight of each value, `[n]`.
        edges: ascending, `[E]`.
    """
    bucket = torch.bucketize(values, edges.to(values.device))
    value_sums = torch.bincount(bucket, weights=values * weights, minlength=len(edges) + 1)
    weight_sums = torch.bincount(bucket, weights=weights, minlength=len(edges) + 1)
    return value_sums.cumsum(0)[: len(edges)], weight_sums.cumsum(0)[: len(edges)]


def _grid(start: float, end: float, step: float) -> list[float]:
    """Return start, start + step, ..., end."""
    count = max(0, math.ceil((end - start) / step - 1e-9))
    return [*(start + i * step for i in range(count)), end]
