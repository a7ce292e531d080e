"""Clip-Cov and KL-Cov: losses that restrict the few tokens that lower the entropy most.

These are the tokens with the largest product of centred advantage and centred log-prob. Shapes: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.draws import token_draws
from rlsys.algo.losses import LOG_RATIO_LIMIT, Clip, Figures, Loss, View, gradient_is_clipped
from rlsys.algo.reduction import Reduce, threshold
from rlsys.config.section import Fraction

ROUNDING = 1e-3
"""Largest rounding difference of a log-ratio between layouts or kernels. The sign of a smaller log-ratio is not
used."""
GRID = 2.0**-13
"""Spacing of the grid to which scaled covariances are rounded. Random draws order equal ones."""


class Means(NamedTuple):
    """Statistics of the counted tokens of an update on all ranks.

    Attributes:
        tokens: Number of counted tokens.
        advantage: Mean advantage.
        logp: Mean log-prob at the start of the update.
    """

    tokens: float
    advantage: float
    logp: float


def means(parts: Sequence[Batch], reduce: Reduce) -> Means:
    """Compute the means over the counted tokens of an update."""
    sums = torch.zeros(3, dtype=torch.float64, device=parts[0].mu.device)
    for part in parts:
        columns = (torch.ones_like(part.mu), part.signal("advantages"), part.signal("current"))
        sums += torch.stack([c[part.counted_tokens].double().sum() for c in columns])
    tokens, advantage, logp = reduce(sums).tolist()
    return Means(tokens, advantage / max(tokens, 1.0), logp / max(tokens, 1.0))


def covariance(batch: Batch, update_means: Means) -> Tensor:
    """Compute (A - mean A)(logp - mean logp) for each token, `[T]` float64; 0 where masked."""
    advantages, logp = batch.signal("advantages").double(), batch.signal("current").double()
    return batch.masked((advantages - update_means.advantage) * (logp - update_means.logp))


class ClipCov(Clip):
    """PPO's clip without the gradient of randomly selected tokens among those that lower the entropy most.

    Candidates are the unclipped tokens with cov_low < c < cov_high, where c = (A - mean A)(logp - mean logp) with
    log-probs at the start of the update and means over all its tokens. The number of selected tokens is `share` times
    the number of all tokens, but at least one.
    """

    paper: ClassVar[str] = "The entropy mechanism of RL for reasoning models (Cui et al. 2025): Clip-Cov"
    evidence: ClassVar[str] = "R"
    every_sample: ClassVar[bool] = True
    share: Fraction = 2e-4
    """Number of selected tokens as a share of all tokens of the update."""
    cov_low: float = 1.0
    """Lower limit of c for a candidate."""
    cov_high: float = 5.0
    """Upper limit of c for a candidate."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low = {self.cov_low}: expected less than cov_high = {self.cov_high}")
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return advantages != 0

    def _candidates(self, batch: Batch, anchor: Tensor, update_means: Means) -> Tensor:
        """Return the mask of the tokens that can be selected, `[T]` bool."""
        gap = batch.masked(batch.signal("current") - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        bounds = (1 - self.clip_low, 1 + self.clip_high, self.dual)
        c = covariance(batch, update_means)
        in_range = (c > self.cov_low) & (c < self.cov_high)
        clipped = gradient_is_clipped(gap.exp(), batch.signal("advantages"), *bounds)
        return batch.counted_tokens & in_range & ~clipped

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the means, and the largest random draw of a selected token."""
        update_means = means(parts, reduce)
        max_selected = max(1, int(self.share * update_means.tokens))
        draws = [
            token_draws(part)[self._candidates(part, anchor, update_means)]
            for part, anchor in zip(parts, anchors, strict=True)
        ]
        bound = threshold(draws, lambda edges, counts, sums: counts <= max_selected, -1.0, 1.0, reduce)
        return update_means, bound

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        update_means, bound = update_stats
        dropped = self._candidates(view.batch, view.anchor, update_means) & (token_draws(view.batch) <= bound)
        loss, figures = super().__call__(view, None)
        return loss * ~dropped, {"clipped": figures["clipped"] | dropped}


class KlCov(Loss):
    """-r A without a clip, plus a penalty on the change of the few tokens that lower the entropy most.

    The penalty coefficient * |logp - anchor| applies to the tokens with the largest c = (A - mean A)(logp - mean
    logp), with log-probs at the start of the update and means over all its tokens. Their number is `share` times the
    number of all tokens, but at least one. Random draws order tokens with equal c.
    """

    paper: ClassVar[str] = "The entropy mechanism of RL for reasoning models (Cui et al. 2025): KL-Cov"
    evidence: ClassVar[str] = "R"
    every_sample: ClassVar[bool] = True
    share: Fraction = 2e-4
    """Number of penalised tokens as a share of all tokens of the update."""
    coefficient: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the penalty. The default is that of verl's config; the default in verl's code is 1."""

    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return (advantages != 0) | (self.coefficient != 0)

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the means, and the largest `_rank` of a token without penalty."""
        update_means = means(parts, reduce)
        unpenalised = update_means.tokens - max(1, int(self.share * update_means.tokens))
        ranks = [_rank(part, update_means)[part.counted_tokens] for part in parts]
        bound = threshold(ranks, lambda edges, counts, sums: counts <= unpenalised, -1.0, 1.0 + GRID, reduce)
        return update_means, bound

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        update_means, bound = update_stats
        penalised = view.batch.counted_tokens & (_rank(view.batch, update_means) > bound)
        gap = view.log_ratio
        slope = (gap / gap.abs().clamp(min=ROUNDING)).detach()  # the sign, but continuous around 0 (ROUNDING)
        penalty = self.coefficient * gap * slope * penalised
        return penalty - view.ratio * view.advantages, {"held_share": penalised.to(penalty)}


def _rank(batch: Batch, update_means: Means) -> Tensor:
    """Return values in (-1, 1 + GRID) that order tokens by covariance c, `[T]`.

    The value is c / (1 + |c|), rounded to the grid, plus a random draw below the spacing of the grid. The draw is the
    same in every layout, and rounding differences of c between layouts vanish on the grid.
    """
    values = covariance(batch, update_means)
    return ((values / (1 + values.abs()) / GRID).round() + token_draws(batch)) * GRID
