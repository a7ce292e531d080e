"""Corrections for tokens that another policy sampled: weights and rejections.

A weight multiplies a token's policy loss; a rejection removes the token from it. Neither has a gradient, and neither
changes the denominator. Most corrections are functions of rho, the token's probability under a policy divided by its
probability under the policy that sampled it:
- rho = exp(anchor - mu) for a loss term with a ratio to the anchor;
- rho = exp(logp - mu) of the current policy for a loss term without a ratio (Loss.ratio).
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
    """Correction of each token: its factor `weight` `[T]`, and `keep` `[T]` bool, false if it is rejected."""

    weight: Tensor
    keep: Tensor


class CorrectionPlugin(UpdatePlugin):
    """Base of corrections: return the weight of each token, and whether it is rejected."""

    of_anchor: ClassVar[bool] = False
    """Whether the correction depends on rho only. With `algo.anchor: mu` it then has no effect on a term with a
    ratio."""

    weighs: ClassVar[bool] = False
    """Whether the correction multiplies the loss by rho, within bounds."""

    def shift(self, part: Batch, samples: Samples) -> Tensor | None:
        """Return a term that is added to the anchor, `[T]`; None for no term. It is a factor inside the ratio."""
        return None

    def __call__(self, view: View, update_stats: Any) -> Correction:
        raise NotImplementedError


def at_level(log_rho: Tensor, batch: Batch, level: Level) -> Tensor:
    """Return rho of each token, `[T]`, aggregated over the token's sequence.

    Args:
        log_rho: log of the tokens' own rho, `[T]`.
        batch: packed batch of the tokens.
        level: `token`: no aggregation; `sequence`: product over the trained tokens; `geometric`: geometric mean over
            them.
    """
    if level == "token":
        return log_rho.exp()
    total = batch.per_sequence(log_rho)
    if level == "geometric":
        total = total / batch.lengths
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[batch.ids]


class Normalised(CorrectionPlugin):
    """Base of corrections whose weights can be normalised to a mean of 1 over the tokens that are not rejected."""

    of_anchor: ClassVar[bool] = True
    normalise: bool = False
    """Divide weights by their mean over the update's tokens with an advantage that are not rejected. With `anchor:
    interpolated`, or with losses without a ratio, this needs `current`."""

    def correct(self, view: View) -> Correction:
        """Return the correction before normalisation."""
        raise NotImplementedError

    @property
    def prepares(self) -> bool:
        return self.normalise

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the mean weight over all tokens of the update; None without normalisation or without tokens."""
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
