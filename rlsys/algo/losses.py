"""Policy losses on packed tokens. Pure functions: tensors in, token losses and per-token metrics out.

Shapes: T tokens of several samples, one after the other. `logp` carries the gradient; the anchor is the reference of
the clipped ratio. A sum, never a mean: the caller divides by a denominator that was fixed over all ranks before
anything was masked. Log-ratios are clamped to +-20: a token beyond has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.plugin import Plugin
from rlsys.algo.reduction import Reduce

Sums = dict[str, Tensor]
"""Sums over tokens, for metrics: they are added over micro-batches and ranks."""
Figures = dict[str, Tensor]
"""Metrics of a loss term at each token, `[T]`. `clipped`, bool: the term has no gradient there."""

Width = Annotated[float, Field(ge=0, lt=1)]
LOG_RATIO_LIMIT = 20.0


@dataclass
class View:
    """One packed micro-batch under the current policy. `log_ratio` = logp - anchor, 0 where masked; all `[T]`."""

    batch: Batch
    logp: Tensor
    anchor: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    divergence: Tensor | None = None
    totals: Tensor | None = None
    """`[N]`, for each sample the sum of the term's `sample_values`, if sequences of a sample are in several
    micro-batches."""

    @property
    def keep(self) -> Tensor:
        return self.batch.keep

    @property
    def advantages(self) -> Tensor:
        return self.batch.signal("advantages")

    @cached_property
    def log_ratio(self) -> Tensor:
        return self.batch.masked(self.logp - self.anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    @cached_property
    def log_behaviour_ratio(self) -> Tensor:
        """anchor - mu, detached: distance of the anchor from the sampling policy. 0 where masked.

        A term that a correction added to the ratio (`batch.shift`) is excluded, or a weight would cancel it.
        """
        anchor = self.anchor if self.batch.shift is None else self.anchor - self.batch.shift
        gap = self.batch.masked(anchor - self.batch.mu).detach()
        return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def log_total_ratio(self) -> Tensor:
        """logp - mu, detached; 0 where masked."""
        gap = self.batch.masked(self.logp - self.batch.mu).detach()
        return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def over_sample(self, values: Tensor) -> Tensor:
        """Sum `values` `[T]` over the trained tokens of the sample, in all its sequences, at each token."""
        if self.totals is not None:
            return self.batch.expand(self.totals).to(values)
        return self.batch.in_sample(self.batch.per_sequence(values))[self.batch.ids]

    @cached_property
    def sample_lengths(self) -> Tensor:
        """Trained tokens of each token's sample, in all its sequences, `[T]`, at least 1."""
        batch = self.batch
        if batch.sample_lengths is not None:
            return batch.expand(batch.sample_lengths).clamp(min=1)
        return batch.in_sample(batch.lengths_or_zero).clamp(min=1)[batch.ids]


class UpdatePlugin(Plugin):
    """Plug-in that may read all tokens of an optimizer update before the backward pass."""

    @property
    def whole_samples(self) -> bool:
        """Return whether the plug-in aggregates over all sequences of a sample.

        If a sample has several sequences, possibly in different micro-batches, it then needs the signal `current` of
        all of them before the backward pass of an update.
        """
        return False

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return statistics over all tokens of an optimizer update, before its backward pass.

        `__call__` receives the result as `update_stats`.
        """
        return None

    @property
    def prepares(self) -> bool:
        """Return whether the plug-in defines `prepare`."""
        return type(self).prepare is not UpdatePlugin.prepare


class Loss(UpdatePlugin):
    """One term of the objective."""

    policy: ClassVar[bool] = True
    """Whether the term is the policy's, to which corrections apply."""
    ratio: ClassVar[bool] = True
    """Whether its policy part has exp(logp - anchor). Without it, corrections weight that part by exp(logp - mu), not
    by exp(anchor - mu): nothing else corrects for the policy's movement since the anchor. Other terms of the loss
    have no influence on this."""
    reads_anchor: ClassVar[bool] = False
    """Whether it reads logp - anchor without such a ratio, as a penalty does."""
    trains_policy: ClassVar[bool] = False
    """Whether it can train the policy without a term that depends on advantages."""
    critic: ClassVar[bool] = False
    """Whether it trains the critic: with a separate critic, it is not a term of the policy's update."""
    per_sequence: ClassVar[bool] = False
    """Whether the term has one ratio per response, over all sequences of the sample. It then needs the reducer
    sequence_mean; another one would define another method."""

    def sample_values(self, view: View) -> Tensor:
        """Return the values that it sums over a sample, `[T]`, detached. See View.over_sample."""
        raise NotImplementedError

    @property
    def whole_samples(self) -> bool:
        return type(self).sample_values is not Loss.sample_values

    def has_ratio(self, view: View) -> Tensor:
        """Return the tokens at which the policy part has the ratio, `[T]` bool."""
        return torch.full_like(view.keep, self.ratio)

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        """Return the samples `[N]` or tokens `[T]` at which the term can have a gradient with its current weight,
        bool.

        An update without such tokens is skipped. `rewards` are those before shaping.
        """
        return (
            advantages != 0 if self.policy and not self.every_sample else torch.ones_like(advantages).bool()
        )

    @classmethod
    def ratios(cls) -> frozenset[bool]:
        """Return the possible values of `has_ratio`; empty if corrections do not apply."""
        if not cls.policy:
            return frozenset()
        return frozenset({cls.ratio} if cls.has_ratio is Loss.has_ratio else {True, False})

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        """Return token losses and metrics `[T]`; masked tokens are ignored in both."""
        raise NotImplementedError


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Compute -min(r A, clip(r, low, high) A), and at most `dual` |A| where A < 0, token by token."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


def gradient_is_clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Return the tokens where `clipped_surrogate` has no gradient, `[T]` bool."""
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return clipped if dual is None else clipped | ((advantages < 0) & (ratio > dual))


class Clip(Loss):
    """PPO's clipped ratio: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with DAPO's split widths.

    `dual` caps the loss of tokens with A < 0 at dual |A| (dual clip).
    """

    paper: ClassVar[str] = "PPO (Schulman et al. 2017), eq. 7; DAPO, section 3.1"
    evidence: ClassVar[str] = "R"
    clip_low: Width = 0.2
    """Lower width."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Upper width; a value above clip_low lets unlikely tokens with positive advantage grow (clip-higher)."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Cap of the ratio where the advantage is negative."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        bounds = (1 - self.clip_low, 1 + self.clip_high, self.dual)
        loss = clipped_surrogate(view.ratio, view.advantages, *bounds)
        return loss, {"clipped": gradient_is_clipped(view.ratio.detach(), view.advantages, *bounds)}


class Reinforce(Loss):
    """-A logp, without ratio or clip: only corrections weight stale tokens.

    Corrections use exp(logp - mu) of the current policy for any `algo.anchor`, so later updates of a step are
    corrected for the movement of earlier ones (policy gradient with rollout importance weights, verl's bypass mode).
    """

    ratio: ClassVar[bool] = False

    paper: ClassVar[str] = "REINFORCE (Williams 1992)"
    evidence: ClassVar[str] = "R"

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        return -view.advantages * view.logp, {}


class ValueLoss(Loss):
    """The critic's squared error to its returns, clipped around its earlier prediction.

    coefficient / 2 * max((V - G)^2, (clip(V, V_old +- clip) - G)^2); G is set by `advantage: gae`.
    """

    paper: ClassVar[str] = "PPO (Schulman et al. 2017), eq. 9, with the value clip of its implementations"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    critic: ClassVar[bool] = True
    ratio: ClassVar[bool] = False
    coefficient: Annotated[float, Field(ge=0)] = 0.5
    """Weight."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """Largest change of a prediction within one step."""

    def needs(self) -> frozenset[str]:
        return frozenset({"values"})

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return torch.full_like(advantages, self.coefficient != 0, dtype=torch.bool)

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        if view.values is None:
            raise ValueError("the loss was called without values, which the term 'value' needs")
        old, target = view.batch.signal("values").detach(), view.batch.signal("returns")
        clipped_values = old + (view.values - old).clamp(-self.clip, self.clip)
        error = torch.maximum((view.values - target) ** 2, (clipped_values - target) ** 2) / 2
        return self.coefficient * error, {"value_error": error.detach()}


def log_ratios(parts: Sequence[Batch], anchors: Sequence[Tensor]) -> list[Tensor]:
    """Return current - anchor for each part, `[T]`, 0 where masked."""
    return [
        part.masked(part.signal("current") - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        for part, anchor in zip(parts, anchors, strict=True)
    ]
