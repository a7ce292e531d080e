"""Policy losses on packed tokens: pure functions that return a loss and metrics for each token.

Shapes: N samples of the step, T packed tokens of several samples. `logp` carries the gradient. A ratio is the
probability under the current policy divided by the probability under the anchor. The caller sums the token losses and
divides by a denominator over all ranks, which does not depend on masks. Log-ratios are clamped to +-20; a token
outside this range has no gradient.
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
"""Sums over the tokens of a micro-batch by name, for metrics. They are added over micro-batches and ranks."""
Figures = dict[str, Tensor]
"""Metrics of a loss term for each token, `[T]` by name. `clipped`, bool: a clip removes the term's gradient."""

Width = Annotated[float, Field(ge=0, lt=1)]
LOG_RATIO_LIMIT = 20.0


@dataclass
class View:
    """One packed micro-batch under the current policy. All tensors except `totals` are `[T]`.

    Attributes:
        batch: The micro-batch.
        logp: Log-probs of the current weights.
        anchor: Log-probs of the anchor.
        entropy: Entropy of the policy; None if no plug-in reads it.
        values: Predictions of the critic; None if no plug-in reads them.
        divergence: Divergence from the teacher; None if no plug-in reads it.
        totals: The sum of the loss term's `sample_values` for each sample, `[N]`, if sequences of a sample are in
            several micro-batches; otherwise None.
    """

    batch: Batch
    logp: Tensor
    anchor: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    divergence: Tensor | None = None
    totals: Tensor | None = None

    @property
    def keep(self) -> Tensor:
        """Mask of the trained tokens, `[T]` bool."""
        return self.batch.keep

    @property
    def advantages(self) -> Tensor:
        """Advantages of the tokens, `[T]`."""
        return self.batch.signal("advantages")

    @cached_property
    def log_ratio(self) -> Tensor:
        """logp - anchor, `[T]`; 0 where masked."""
        return self.batch.masked(self.logp - self.anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def ratio(self) -> Tensor:
        """exp(logp - anchor), `[T]`; 1 where masked."""
        return self.log_ratio.exp()

    @cached_property
    def log_behaviour_ratio(self) -> Tensor:
        """anchor - mu without `batch.shift`, `[T]`, detached; 0 where masked.

        With the term that a correction adds to the anchor, the weight of another correction would cancel the term.
        """
        anchor = self.anchor if self.batch.shift is None else self.anchor - self.batch.shift
        gap = self.batch.masked(anchor - self.batch.mu).detach()
        return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @cached_property
    def log_total_ratio(self) -> Tensor:
        """logp - mu, `[T]`, detached; 0 where masked."""
        gap = self.batch.masked(self.logp - self.batch.mu).detach()
        return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def over_sample(self, values: Tensor) -> Tensor:
        """Sum `values` `[T]` over the trained tokens of each sample; return the sum of each token's sample, `[T]`."""
        if self.totals is not None:
            return self.batch.expand(self.totals).to(values)
        return self.batch.in_sample(self.batch.per_sequence(values))[self.batch.ids]

    @cached_property
    def sample_lengths(self) -> Tensor:
        """Number of trained tokens of each token's sample, in all its sequences, `[T]`, at least 1."""
        batch = self.batch
        if batch.sample_lengths is not None:
            return batch.expand(batch.sample_lengths).clamp(min=1)
        return batch.in_sample(batch.lengths_or_zero).clamp(min=1)[batch.ids]


class UpdatePlugin(Plugin):
    """Base of plug-ins that may read all tokens of an optimizer update before the backward pass."""

    @property
    def whole_samples(self) -> bool:
        """Return whether the plug-in aggregates over all sequences of a sample.

        The sequences of a sample may be in different micro-batches. Such a plug-in then needs the signal `current` of
        all of them before the backward pass of an update.
        """
        return False

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """Return statistics over all tokens of an optimizer update, which `__call__` receives as `update_stats`.

        Args:
            parts: micro-batches of the update on this rank.
            anchors: log-probs of the anchor, `[T]` for each micro-batch.
            reduce: sum over ranks.
        """
        return None

    @property
    def prepares(self) -> bool:
        """Return whether the plug-in defines `prepare`."""
        return type(self).prepare is not UpdatePlugin.prepare


class Loss(UpdatePlugin):
    """Base of the loss terms of an objective."""

    policy: ClassVar[bool] = True
    """Whether the term is a policy loss, to which corrections apply."""
    ratio: ClassVar[bool] = True
    """Whether the policy loss contains exp(logp - anchor). If not, corrections of this term use exp(logp - mu)
    instead of exp(anchor - mu), because nothing else corrects for the policy's movement since the anchor."""
    reads_anchor: ClassVar[bool] = False
    """Whether the term reads logp - anchor without such a ratio, for example as a penalty."""
    trains_policy: ClassVar[bool] = False
    """Whether the term can train the policy without a term that depends on advantages."""
    critic: ClassVar[bool] = False
    """Whether the term trains the critic. With a separate critic, it is not part of the policy's update."""
    per_sequence: ClassVar[bool] = False
    """Whether the term has one ratio per response, over all sequences of the sample. The method is then defined for
    the reducer sequence_mean."""

    def sample_values(self, view: View) -> Tensor:
        """Return the values that the term sums over a sample, `[T]`, detached. See View.over_sample."""
        raise NotImplementedError

    @property
    def whole_samples(self) -> bool:
        return type(self).sample_values is not Loss.sample_values

    def has_ratio(self, view: View) -> Tensor:
        """Return the mask of the tokens whose policy loss contains exp(logp - anchor), `[T]` bool."""
        return torch.full_like(view.keep, self.ratio)

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        """Return the mask of the samples or tokens that can have a gradient of this term, `[N]` or `[T]` bool.

        The mask depends on the current weight of the term. An update without such tokens is skipped.

        Args:
            advantages: advantages of samples `[N]` or tokens `[T]`.
            rewards: rewards before shaping, same shape.
        """
        return (
            advantages != 0 if self.policy and not self.every_sample else torch.ones_like(advantages).bool()
        )

    @classmethod
    def ratios(cls) -> frozenset[bool]:
        """Return the possible values of `has_ratio`; empty if corrections do not apply to the term."""
        if not cls.policy:
            return frozenset()
        return frozenset({cls.ratio} if cls.has_ratio is Loss.has_ratio else {True, False})

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        """Return the loss of each token, `[T]`, and metrics. The values of masked tokens are ignored.

        Args:
            view: the micro-batch under the current policy.
            update_stats: result of `prepare` for the update; None if the term has none.
        """
        raise NotImplementedError


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Compute -min(r A, clip(r, low, high) A) for each token, `[T]`; where A < 0, limit it to `dual` |A|."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


def gradient_is_clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """Return the mask of the tokens whose `clipped_surrogate` has no gradient, `[T]` bool."""
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return clipped if dual is None else clipped | ((advantages < 0) & (ratio > dual))


class Clip(Loss):
    """PPO's clipped surrogate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with DAPO's two clip widths.

    `dual` limits the loss of tokens with A < 0 to dual |A| (dual clip).
    """

    paper: ClassVar[str] = "PPO (Schulman et al. 2017), eq. 7; DAPO, section 3.1"
    evidence: ClassVar[str] = "R"
    clip_low: Width = 0.2
    """Clip width below a ratio of 1."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Clip width above a ratio of 1. A value above clip_low lets unlikely tokens with a positive advantage become
    more likely (clip-higher)."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio with a gradient where the advantage is negative; null: no limit."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        bounds = (1 - self.clip_low, 1 + self.clip_high, self.dual)
        loss = clipped_surrogate(view.ratio, view.advantages, *bounds)
        return loss, {"clipped": gradient_is_clipped(view.ratio.detach(), view.advantages, *bounds)}


class Reinforce(Loss):
    """-A logp without ratio and clip; only corrections weight stale tokens.

    Corrections use exp(logp - mu) of the current policy for any `algo.anchor`, so they also correct later updates of
    a step for the earlier ones (policy gradient with rollout importance weights; verl's bypass mode).
    """

    ratio: ClassVar[bool] = False

    paper: ClassVar[str] = "REINFORCE (Williams 1992)"
    evidence: ClassVar[str] = "R"

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        return -view.advantages * view.logp, {}


class ValueLoss(Loss):
    """The critic's squared error to the return G, clipped around its prediction V_old at the start of the step.

    The loss is coefficient / 2 * max((V - G)^2, (clip(V, V_old +- clip) - G)^2). `advantage: gae` computes G.
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
            raise ValueError(
                "values = None; expected predictions of the critic, which the loss term 'value' needs"
            )
        old, target = view.batch.signal("values").detach(), view.batch.signal("returns")
        clipped_values = old + (view.values - old).clamp(-self.clip, self.clip)
        error = torch.maximum((view.values - target) ** 2, (clipped_values - target) ** 2) / 2
        return self.coefficient * error, {"value_error": error.detach()}


def log_ratios(parts: Sequence[Batch], anchors: Sequence[Tensor]) -> list[Tensor]:
    """Return current - anchor of each micro-batch, `[T]`, clamped to +-LOG_RATIO_LIMIT; 0 where masked."""
    return [
        part.masked(part.signal("current") - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        for part, anchor in zip(parts, anchors, strict=True)
    ]
