"""Losses that treat the few tokens that lower the entropy most differently: those where advantage and log-prob
covary.
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
"""Upper bound of the rounding difference of a log-ratio between layouts or kernels: a smaller one has no sign."""
GRID = 2.0**-13
"""Grid on which scaled covariances are compared; a draw orders equal ones."""


class Means(NamedTuple):
    """Means over the counted tokens of an update, over all ranks."""

    tokens: float
    advantage: float
    logp: float


def means(parts: Sequence[Batch], reduce: Reduce) -> Means:
    """Return the means over an update; log-probs are those at its start."""
    sums = torch.zeros(3, dtype=torch.float64, device=parts[0].mu.device)
    for part in parts:
        columns = (torch.ones_like(part.mu), part.signal("advantages"), part.signal("current"))
        sums += torch.stack([c[part.counted_tokens].double().sum() for c in columns])
    tokens, advantage, logp = reduce(sums).tolist()
    return Means(tokens, advantage / max(tokens, 1.0), logp / max(tokens, 1.0))


def covariance(batch: Batch, of: Means) -> Tensor:
    """Compute (A - mean A)(logp - mean logp) of each token, `[T]` float64; 0 where masked."""
    advantages, logp = batch.signal("advantages").double(), batch.signal("current").double()
    return batch.masked((advantages - of.advantage) * (logp - of.logp))


class ClipCov(Clip):
    """PPO's clip without the gradient of randomly selected tokens among those that lower the entropy most.

    c = (A - mean A)(logp - mean logp), with log-probs at the start of the update and means over all its tokens. Among
    the unclipped tokens with cov_low < c < cov_high, `share` of all tokens, but at least one, are selected at random.
    """

    paper: ClassVar[str] = "The entropy mechanism of RL for reasoning models (Cui et al. 2025): Clip-Cov"
    evidence: ClassVar[str] = "R"
    every_sample: ClassVar[bool] = True
    share: Fraction = 2e-4
    """Tokens dropped, as a share of all tokens of the update."""
    cov_low: float = 1.0
    """Lower bound of the covariance of a token that can be dropped."""
    cov_high: float = 5.0
    """Upper bound of the covariance of a token that can be dropped."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low = {self.cov_low}: expected less than cov_high = {self.cov_high}")
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return advantages != 0

    def _candidates(self, batch: Batch, anchor: Tensor, of: Means) -> Tensor:
        """Return the tokens that may be dropped, `[T]` bool."""
        gap = batch.masked(batch.signal("current") - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        bounds = (1 - self.clip_low, 1 + self.clip_high, self.dual)
        covary = covariance(batch, of)
        inside = (covary > self.cov_low) & (covary < self.cov_high)
        return (
            batch.counted_tokens
            & inside
            & ~gradient_is_clipped(gap.exp(), batch.signal("advantages"), *bounds)
        )

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the means, and the largest draw of a dropped token."""
        of = means(parts, reduce)
        max_dropped = max(1, int(self.share * of.tokens))
        draws = [token_draws(p)[self._candidates(p, a, of)] for p, a in zip(parts, anchors, strict=True)]
        return of, threshold(draws, lambda edges, counts, sums: counts <= max_dropped, -1.0, 1.0, reduce)

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        of, bound = update_stats
        dropped = self._candidates(view.batch, view.anchor, of) & (token_draws(view.batch) <= bound)
        loss, figures = super().__call__(view, None)
        return loss * ~dropped, {"clipped": figures["clipped"] | dropped}


class KlCov(Loss):
    """The unclipped ratio, with a penalty on the movement of the few tokens that lower the entropy most.

    -r A, plus coefficient * |logp - anchor| on the `share` of all tokens, but at least one, with the largest
    c = (A - mean A)(logp - mean logp); log-probs are those at the start of the update, means are over all its tokens.
    A draw orders tokens with equal c.
    """

    paper: ClassVar[str] = "The entropy mechanism of RL for reasoning models (Cui et al. 2025): KL-Cov"
    evidence: ClassVar[str] = "R"
    every_sample: ClassVar[bool] = True
    share: Fraction = 2e-4
    """Penalised tokens, as a share of all tokens of the update."""
    coefficient: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the penalty: verl's configuration; its code falls back to 1."""

    def needs(self) -> frozenset[str]:
        return frozenset({"current"})

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return (advantages != 0) | (self.coefficient != 0)

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return the means, and the rank above which a token is penalised."""
        of = means(parts, reduce)
        unpenalised = of.tokens - max(1, int(self.share * of.tokens))
        ranks = [_rank(part, of)[part.counted_tokens] for part in parts]
        return of, threshold(
            ranks, lambda edges, counts, sums: counts <= unpenalised, -1.0, 1.0 + GRID, reduce
        )

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        of, bound = update_stats
        penalised = view.batch.counted_tokens & (_rank(view.batch, of) > bound)
        gap = view.log_ratio
        slope = (gap / gap.abs().clamp(min=ROUNDING)).detach()  # its sign, except for possible rounding
        penalty = self.coefficient * gap * slope * penalised
        return penalty - view.ratio * view.advantages, {"held_share": penalised.to(penalty)}


def _rank(batch: Batch, of: Means) -> Tensor:
    """Return values that order tokens by covariance c, within (-1, 1 + GRID), `[T]`: c / (1 + |c|) on a grid + a
    draw.

    Tokens that differ only by rounding are equal on the grid, and the draw is the same in every layout.
    """
    values = covariance(batch, of)
    return ((values / (1 + values.abs()) / GRID).round() + token_draws(batch)) * GRID
