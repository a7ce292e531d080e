"""BAPO: balanced policy optimisation with adaptive clipping.

Needs `current`, the log-probs just before the update, for a pass over all tokens before the backward pass. The
decision is a function of sums over all ranks, and does not depend on the signs of log-ratios that are only rounding:
another CPU or another layout rounds differently.
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
"""Bounds that BAPO compares in one update: each is a column of a small table on every rank."""


TIE = 1e-9
"""Relative difference below which float64 sums count as equal: layouts add them in different orders."""


class Bapo(Loss):
    """Clip bounds that widen until positive samples contribute their share of the loss.

    C+ = sum_{A >= 0} min(r, high) A; C- = sum_{A < 0} max(r, low) |A|. From the lowest bounds, `low` goes up to its
    maximum, then `high`, until C+ / C- reaches `target`. The sums are those of the authors, although a higher `low`
    makes C- larger: it removes the gradient of negative tokens, not their share of the sum. `target` is a ratio: 1
    corresponds to the paper's share of one half; the authors' script uses 0.5.
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
    """Step of the search."""
    target: Annotated[float, Field(ge=0)] = 1.0
    """Target of C+ / C-."""
    dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
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
        """Return the compared bounds, in order."""
        lows = _grid(self.low_min, self.low_max, self.step)
        highs = _grid(self.high_min, self.high_max, self.step)
        return [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        path = self.path()
        lows, highs = (torch.tensor(side, dtype=torch.float64) for side in zip(*path, strict=True))
        sums = torch.zeros(2, len(path), dtype=torch.float64, device=parts[0].mu.device)
        for part, delta in zip(parts, log_ratios(parts, anchors), strict=True):
            is_counted = part.counted_tokens
            ratio, advantages = (
                delta.double().exp()[is_counted],
                part.signal("advantages").double()[is_counted],
            )
            good, bad = advantages >= 0, advantages < 0
            under, over, weight = split_sums(ratio[good], advantages[good], highs)
            sums[0] += under + highs.to(weight) * (weight.sum() - over)
            under, over, weight = split_sums(ratio[bad], -advantages[bad], lows)
            sums[1] += lows.to(weight) * over + (ratio[bad] * weight).sum() - under
        positive, negative = reduce(sums).cpu()
        enough = (positive >= self.target * negative * (1 - TIE)).tolist()
        return path[enough.index(True)] if True in enough else path[-1]

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        bounds = (*update_stats, self.dual)
        clipped = gradient_is_clipped(view.ratio.detach(), view.advantages, *bounds)
        return clipped_surrogate(view.ratio, view.advantages, *bounds), {"clipped": clipped}


def split_sums(values: Tensor, weights: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over the values <= each ascending edge, `[E]`, of value * weight and of weight; and the weights."""
    bucket = torch.bucketize(values, edges.to(values.device))
    sums = [torch.bincount(bucket, weights=w, minlength=len(edges) + 1) for w in (values * weights, weights)]
    under, over = (s.cumsum(0)[: len(edges)] for s in sums)
    return under, over, weights


def _grid(start: float, end: float, step: float) -> list[float]:
    """Return start, start + step, ..., end."""
    count = max(0, math.ceil((end - start) / step - 1e-9))
    return [*(start + i * step for i in range(count)), end]
