"""Losses whose bounds come from all tokens of an optimizer update: M2PO and BAPO.

Both need `now`, the log-probs just before the update, for a pass over all tokens before the backward; what they
decide is a function of sums over all ranks. It does not hang on the signs of log-ratios that are only rounding:
another CPU or another layout rounds otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.losses import LOG_RATIO_LIMIT, Figures, Loss, View, clipped_surrogate, lost_gradient
from rlsys.algo.reduction import Reduce, threshold

MOST_TRIES = 10_000
"""Bounds that BAPO compares in one update: each is a column of a small table on every rank."""
NOISE = 1e-3
"""A log-ratio closer to 0 may have its sign from rounding."""
TIE = 1e-9
"""Sums of float64 that are closer, relatively, are equal: their order differs between layouts."""


def log_ratios(parts: Sequence[Batch], anchors: Sequence[Tensor]) -> list[Tensor]:
    """now - anchor of each part, `[T]`, 0 where masked."""
    return [
        part.masked(part.signal("now") - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        for part, anchor in zip(parts, anchors, strict=True)
    ]


def largest_kept(squares: Sequence[Tensor], budget: float, reduce: Reduce) -> float:
    """Largest square that stays when the biggest are dropped until the mean of the rest is within `budget`."""

    def holds(edges: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        return sums <= budget * counts.clamp(min=1)

    return threshold(squares, holds, 0.0, LOG_RATIO_LIMIT**2, reduce)


def largest_cap(squares: Sequence[Tensor], tokens: Tensor, budget: float, reduce: Reduce) -> float:
    """Largest cap c with sum(min(square, c^2)) <= budget * tokens; the limit of log-ratios when no cap is needed.

    tokens: float64 scalar, this rank's share of the number that the budget is a mean over.
    """
    total, n = reduce(torch.stack([tokens.new_tensor(float(sum(len(s) for s in squares))), tokens])).cpu()

    def holds(edges: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        return sums + edges * (total - counts) <= budget * n.clamp(min=1)

    return math.sqrt(threshold(squares, holds, 0.0, LOG_RATIO_LIMIT**2, reduce))


class M2PO(Loss):
    """A budget for the second moment of the log-ratio instead of a clip on each token: made for stale data.

    D = now - anchor. `mask` (the paper): drop the tokens of largest D^2 until the mean of the rest is at most tau;
    the kept have the plain loss -r A. `bounds` (the authors' code): over the tokens where a trust region can bite
    (A > 0 and D > 0, or A < 0 and D < 0), if the mean of D^2 exceeds tau, find the largest cap c whose mean
    min(|D|, c)^2 meets it, and clip every ratio to [exp(-c), exp(c)]. Ours runs over the whole update and all ranks;
    the authors' code runs it per micro-batch. Tokens of advantage 0 are in no mean: whether they are there at all
    depends on other terms of the loss.

    The number that `bounds` divides by counts a token with |D| < 0.001 as a half, plus or minus (D / 0.001)^2 / 2 by
    the side that it is on. Of tokens that engine and trainer agree on, the authors' code counts those whose rounding
    has the right sign: a half of them, too, but another half on each machine.
    """

    paper: ClassVar[str] = "M2PO: second-moment trust policy optimisation"
    evidence: ClassVar[str] = "R"
    tau: Annotated[float, Field(gt=0)] = 0.04
    """Budget of the second moment."""
    form: Literal["bounds", "mask"] = "bounds"
    """The authors' code, or the paper's text."""
    floor_low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """bounds: never clip above 1 - floor_low."""
    floor_high: Annotated[float, Field(ge=0)] | None = None
    """bounds: never clip below 1 + floor_high."""

    def needs(self) -> frozenset[str]:
        return frozenset({"now"})

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        deltas = log_ratios(parts, anchors)
        if self.form == "mask":
            kept = [d[p.active] ** 2 for d, p in zip(deltas, parts, strict=True)]
            return largest_kept(kept, self.tau, reduce)
        bites = [
            (d * p.signal("advantages").sign())[p.active].double() for d, p in zip(deltas, parts, strict=True)
        ]
        near = [(b / NOISE).clamp(-1, 1) for b in bites]
        tokens = torch.stack([((1 + x * x.abs()) / 2).sum() for x in near]).sum()
        cap = largest_cap([b[b > 0] ** 2 for b in bites], tokens, self.tau, reduce)
        low = math.exp(-cap) if self.floor_low is None else min(math.exp(-cap), 1 - self.floor_low)
        high = math.exp(cap) if self.floor_high is None else max(math.exp(cap), 1 + self.floor_high)
        return low, high

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        if self.form == "mask":
            delta = view.batch.masked(view.batch.signal("now") - view.anchor).clamp(
                -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
            )
            inside = delta**2 <= prepared
            return -view.ratio * view.advantages * inside, {"clipped": ~inside}
        lost = lost_gradient(view.ratio.detach(), view.advantages, *prepared)
        return clipped_surrogate(view.ratio, view.advantages, *prepared), {"clipped": lost}


class Bapo(Loss):
    """Clip bounds that widen until positive samples contribute their share of the loss.

    C+ = sum_{A >= 0} min(r, high) A; C- = sum_{A < 0} max(r, low) |A|. From the lowest bounds, `low` goes up to its
    maximum, then `high`, until C+ / C- reaches `target`. The authors' sums are kept as they are, though a higher
    `low` makes C- larger, not smaller: what it removes is the gradient of negative tokens. `target` is a ratio: 1 is
    the paper's share of one half; the authors' script uses 0.5.
    """

    paper: ClassVar[str] = "BAPO: balanced policy optimisation with adaptive clipping"
    evidence: ClassVar[str] = "R"
    low_min: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Lower bound of the ratio at the start."""
    low_max: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Its highest value."""
    high_min: Annotated[float, Field(ge=1)] = 1.2
    """Upper bound of the ratio at the start."""
    high_max: Annotated[float, Field(ge=1)] = 3.0
    """Its highest value."""
    step: Annotated[float, Field(gt=0)] = 0.05
    """Step of the search."""
    target: Annotated[float, Field(ge=0)] = 1.0
    """Wanted C+ / C-."""
    dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        for side, start, end in (
            ("low", self.low_min, self.low_max),
            ("high", self.high_min, self.high_max),
        ):
            if start > end:
                raise ValueError(f"{side}_min = {start} must not be above {side}_max = {end}")
        tries = (self.low_max - self.low_min + self.high_max - self.high_min) / self.step
        if tries > MOST_TRIES:
            raise ValueError(f"step = {self.step} makes {tries:.3g} bounds to try; at most {MOST_TRIES}")
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"now"})

    def path(self) -> list[tuple[float, float]]:
        """The bounds tried, in order."""
        lows = _ladder(self.low_min, self.low_max, self.step)
        highs = _ladder(self.high_min, self.high_max, self.step)
        return [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        path = self.path()
        lows, highs = (torch.tensor(side, dtype=torch.float64) for side in zip(*path, strict=True))
        sums = torch.zeros(2, len(path), dtype=torch.float64, device=parts[0].mu.device)
        for part, delta in zip(parts, log_ratios(parts, anchors), strict=True):
            ratio, advantages = delta.double().exp()[part.keep], part.signal("advantages").double()[part.keep]
            good, bad = advantages >= 0, advantages < 0
            under, over, weight = split_sums(ratio[good], advantages[good], highs)
            sums[0] += under + highs.to(weight) * (weight.sum() - over)
            under, over, weight = split_sums(ratio[bad], -advantages[bad], lows)
            sums[1] += lows.to(weight) * over + (ratio[bad] * weight).sum() - under
        positive, negative = reduce(sums).cpu()
        enough = (positive >= self.target * negative * (1 - TIE)).tolist()
        return path[enough.index(True)] if True in enough else path[-1]

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        bounds = (*prepared, self.dual)
        lost = lost_gradient(view.ratio.detach(), view.advantages, *bounds)
        return clipped_surrogate(view.ratio, view.advantages, *bounds), {"clipped": lost}


def split_sums(values: Tensor, weights: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For ascending edges `[E]`: sums over values <= edge of value * weight and of weight, `[E]`; and the weights."""
    place = torch.bucketize(values, edges.to(values.device))
    sums = [torch.bincount(place, weights=w, minlength=len(edges) + 1) for w in (values * weights, weights)]
    under, over = (s.cumsum(0)[: len(edges)] for s in sums)
    return under, over, weights


def _ladder(start: float, end: float, step: float) -> list[float]:
    """start, start + step, ..., end."""
    count = max(0, math.ceil((end - start) / step - 1e-9))
    return [*(start + i * step for i in range(count)), end]
