"""Corrections for tokens that another policy sampled: weights and rejections, kept separate. All detached.

rho = exp(anchor - mu): the probability ratio of the anchor to the policy that sampled the token; for a term without a
ratio to the anchor, exp(logp - mu) of the current policy (Loss.ratio). A weight multiplies the policy's loss; a
rejection removes a token from it. Neither changes the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.losses import LOG_RATIO_LIMIT, UpdatePlugin, View
from rlsys.algo.reduction import Reduce

Level = Literal["token", "sequence", "geometric"]
PositiveFloat = Annotated[float, Field(gt=0)]


class Correction(NamedTuple):
    """Factors `weight` `[T]` of the loss, and mask `keep` `[T]` bool of the tokens that are not rejected."""

    weight: Tensor
    keep: Tensor


class CorrectionPlugin(UpdatePlugin):
    """Weights and rejections of tokens."""

    of_anchor: ClassVar[bool] = False
    """Whether it depends on rho: with `algo.anchor: mu` it has no effect on a term with a ratio."""

    weighs: ClassVar[bool] = False
    """Whether it multiplies the loss by exp(anchor - mu), within its bounds."""

    def shift(self, part: Batch, samples: Samples) -> Tensor | None:
        """Return a term that is added to the anchor, `[T]`, that is, a factor inside the ratio; None for no term."""
        return None

    def __call__(self, view: View, update_stats: Any) -> Correction:
        raise NotImplementedError


def at_level(log_rho: Tensor, batch: Batch, level: Level) -> Tensor:
    """Return rho at each token, `[T]`: the token's own, or the product or geometric mean over its sequence."""
    if level == "token":
        return log_rho.exp()
    total = batch.per_sequence(log_rho)
    if level == "geometric":
        total = total / batch.lengths
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[batch.ids]


class Normalised(CorrectionPlugin):
    """Base of corrections whose weights can be normalised to a mean of 1 over the accepted tokens."""

    of_anchor: ClassVar[bool] = True
    normalise: bool = False
    """Divide by the mean weight of the update's kept tokens that have an advantage (with `anchor: interpolated`, or
    losses without a ratio, that needs `current`)."""

    def correct(self, view: View) -> Correction:
        """Return the weights before normalisation."""
        raise NotImplementedError

    @property
    def prepares(self) -> bool:
        return self.normalise

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the mean weight; None without normalisation or without tokens."""
        if not self.normalise:
            return None
        sums = torch.zeros(2, dtype=torch.float64, device=parts[0].mu.device)
        for part, anchor in zip(parts, anchors, strict=True):
            weight, keep = self.correct(View(part, anchor, anchor))
            keep = keep & part.active
            sums += torch.stack([weight[keep].double().sum(), keep.double().sum()])
        total, count = reduce(sums)
        return (total / count).clamp(min=math.exp(-LOG_RATIO_LIMIT)) if count else None

    def __call__(self, view: View, update_stats: Any) -> Correction:
        weight, keep = self.correct(view)
        return Correction(weight if update_stats is None else weight / update_stats.to(weight), keep)
