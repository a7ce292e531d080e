"""Corrections for tokens that another policy sampled: weights and rejections, kept apart. All detached.

rho = exp(anchor - mu): how much more likely the anchor makes a token than the policy that sampled it. A weight
multiplies the policy's loss; a rejection takes a token out of it. Neither changes the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.losses import LOG_RATIO_LIMIT, Preparing, View
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import group_index, running_min, sum_by

Level = Literal["token", "sequence", "geometric"]
PositiveFloat = Annotated[float, Field(gt=0)]


class Correction(NamedTuple):
    """weight `[T]` multiplies, keep `[T]` bool rejects."""

    weight: Tensor
    keep: Tensor


class CorrectionPlugin(Preparing):
    """Weights and rejections of tokens."""

    of_anchor: ClassVar[bool] = False
    """It acts on exp(anchor - mu): with `algo.anchor: mu` on nothing."""

    def shift(self, part: Batch, samples: Samples) -> Tensor | None:
        """Added to the anchor `[T]`: a factor inside the ratio."""
        return None

    def __call__(self, view: View, prepared: Any) -> Correction:
        raise NotImplementedError


def at_level(log_rho: Tensor, batch: Batch, level: Level) -> Tensor:
    """exp(log rho) of the token, its sequence's product or its sequence's geometric mean, at each token `[T]`."""
    if level == "token":
        return log_rho.exp()
    total = batch.per_sequence(log_rho)
    if level == "geometric":
        total = total / batch.lengths
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[batch.ids]


class Normalised(CorrectionPlugin):
    """Weights of mean 1 over the tokens that it keeps, if asked for."""

    of_anchor: ClassVar[bool] = True
    normalise: bool = False
    """Divide by the mean weight of the update's kept tokens that have an advantage (with `anchor: interpolated`, or
    losses without a ratio, that needs `now`)."""

    def correct(self, view: View) -> Correction:
        """As they are."""
        raise NotImplementedError

    @property
    def prepares(self) -> bool:
        return self.normalise

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Any:
        """The mean weight; None where it is not asked for, or of no token."""
        if not self.normalise:
            return None
        sums = torch.zeros(2, dtype=torch.float64, device=parts[0].mu.device)
        for part, anchor in zip(parts, anchors, strict=True):
            weight, keep = self.correct(View(part, anchor, anchor))
            keep = keep & part.active
            sums += torch.stack([weight[keep].double().sum(), keep.double().sum()])
        total, count = reduce(sums)
        return (total / count).clamp(min=math.exp(-LOG_RATIO_LIMIT)) if count else None

    def __call__(self, view: View, prepared: Any) -> Correction:
        weight, keep = self.correct(view)
        return Correction(weight if prepared is None else weight / prepared.to(weight), keep)


class Tis(Normalised):
    """Truncated importance weights: min(rho, cap), and at least `floor`.

    `sequence` takes the product over the sequence, `geometric` its mean. `normalise` divides by the mean weight of
    the update's tokens, so that the loss keeps its size.
    """

    paper: ClassVar[str] = (
        "Your efficient RL framework secretly brings you off-policy training (Yao et al. 2025)"
    )
    evidence: ClassVar[str] = "R"
    cap: PositiveFloat = 2.0
    """Largest weight (8 at sequence level)."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight (slime: --tis-clip-low, 0.5 in its GLM-5.2 script)."""
    level: Level = "token"
    """What the ratio is taken over."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.floor > self.cap:
            raise ValueError(f"floor = {self.floor} must not be above cap = {self.cap}")
        return self

    def correct(self, view: View) -> Correction:
        weight = at_level(view.log_behaviour_ratio, view.batch, self.level).clamp(self.floor, self.cap)
        return Correction(weight, view.keep)


class IcePop(Normalised):
    """Reject what lies outside [low, high] of rho, weight the rest by rho (IcePop; masked importance sampling).

    `geometric` with bounds like 0.9999 and 1.0001 rejects whole sequences by their mean. `veto` rejects a sequence
    as soon as one of its tokens has rho below it. `normalise` divides by the mean weight of the kept tokens: a
    rejection still scales nothing up.
    """

    paper: ClassVar[str] = "IcePop (Ring-1T technical report); masked importance sampling"
    evidence: ClassVar[str] = "R"
    low: PositiveFloat = 0.5
    """Smallest ratio kept."""
    high: PositiveFloat = 2.0
    """Largest ratio kept (5 in some reports)."""
    level: Level = "token"
    """What the ratio is taken over."""
    weighted: bool = True
    """Also multiply by rho; without it, rejection alone."""
    veto: Annotated[float, Field(ge=0)] = 0.0
    """Reject the whole sequence when a token's ratio is below this (1e-4 is usual); 0 turns it off."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}: nothing would be kept")
        return self

    def correct(self, view: View) -> Correction:
        batch, log_rho = view.batch, view.log_behaviour_ratio
        ratio = at_level(log_rho, batch, self.level)
        keep = view.keep & (ratio >= self.low) & (ratio <= self.high)
        if self.veto:
            bad = (batch.keep & (log_rho.exp() < self.veto)).to(log_rho.dtype)
            keep = keep & (sum_by(bad, batch.ids, batch.sequences) == 0)[batch.ids]
        return Correction(ratio if self.weighted else torch.ones_like(ratio), keep)


class Opsm(CorrectionPlugin):
    """Reject sequences of negative advantage that the policy has moved away from: mean(mu - logp) > delta.

    Measured from the sampler, whatever the anchor is: after the anchor was taken, nothing has moved yet.
    """

    paper: ClassVar[str] = "Off-policy sequence masking (DeepSeek-V3.2 technical report)"
    evidence: ClassVar[str] = "R"
    delta: Annotated[float, Field(ge=0)] = 1e-4
    """Largest mean of mu - logp of a sequence with A < 0."""

    def __call__(self, view: View, prepared: Any) -> Correction:
        batch = view.batch
        moved = batch.per_sequence(-view.log_total_ratio) / batch.lengths
        away = (moved > self.delta)[batch.ids] & (view.advantages < 0)
        return Correction(torch.ones_like(view.anchor), view.keep & ~away)


class DecoupledPPO(CorrectionPlugin):
    """Decoupled PPO: the clip is taken around a recent anchor, the anchor's distance to mu is a weight.

    w = rho = exp(anchor - mu), clamped to cap ("clamp") or rejected above it ("mask"). The anchor is the config's
    `algo.anchor`: old (recomputed), behaviour (exact), interpolated (mu + alpha (logp - mu)), ewma.
    """

    paper: ClassVar[str] = "AReaL, eq. 5; Batch size-invariance for policy optimisation (Hilton et al. 2022)"
    evidence: ClassVar[str] = "R"
    of_anchor: ClassVar[bool] = True
    cap: PositiveFloat = 5.0
    """Largest weight."""
    above: Literal["clamp", "mask"] = "mask"
    """What happens to a token above it."""

    def __call__(self, view: View, prepared: Any) -> Correction:
        rho = view.log_behaviour_ratio.exp()
        keep = view.keep if self.above == "clamp" else view.keep & (rho <= self.cap)
        return Correction(rho.clamp(max=self.cap), keep)


class MinPro(CorrectionPlugin):
    """Weight each token by the smallest ratio among the tokens before it, instead of by their product.

    w_t = min_{j < t} exp(logp_j - mu_j), 1 for the first token; the token's own ratio is in the loss. A reading of
    the abstract: whether the authors include j = t, and what they clip, was not found: see
    `inclusive` and `cap`.
    """

    paper: ClassVar[str] = "A Step Back: prefix importance ratio (MinPRO)"
    evidence: ClassVar[str] = "A"
    inclusive: bool = False
    """Take the token itself into the minimum."""
    cap: PositiveFloat | None = 1.0
    """Largest weight; none when null."""

    def __call__(self, view: View, prepared: Any) -> Correction:
        batch, keep = view.batch, view.keep
        lowest = running_min(view.log_total_ratio[keep], batch.ids[keep], inclusive=self.inclusive)
        log_weight = torch.zeros_like(view.anchor).masked_scatter(
            keep, torch.where(lowest.isinf(), 0.0, lowest)
        )
        weight = log_weight.exp()
        return Correction(weight if self.cap is None else weight.clamp(max=self.cap), keep)


class LensWeights(CorrectionPlugin):
    """Samples drawn from a cleaned prompt are trained on the original one, with w inside the ratio.

    r = exp(logp(y | x) - mu(y | x used)) / w in groups that hold such samples (after `selectors: [lens]`), w = 1 in
    all others. w = a for the prompt's own successes, 1 - a for transferred successes and the failures that remain,
    a = the success rate of all own samples. w is kept at least `smallest`, which is ours. Beside a clip, a sample
    with A > 0 and 1 / w above the upper bound has no gradient.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Smallest w."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def sample_weight(self, samples: Samples) -> Tensor:
        """w, `[N]`."""
        transferred, counted = samples.column("transferred").bool(), samples.counted
        own, success = ~transferred, samples.reward > self.correct
        held = transferred if counted is None else transferred & counted
        index, sizes = group_index(samples.group_ids)
        wins, count, mixed = (
            sum_by(rows.double(), index, len(sizes))[index] for rows in (own & success, own, held)
        )
        rate = wins / count.clamp(min=1)
        weight = torch.where(own & success, rate, 1 - rate).clamp(min=self.smallest)
        return torch.where(mixed > 0, weight, torch.ones_like(weight))

    def shift(self, part: Batch, samples: Samples) -> Tensor | None:
        return part.expand(self.sample_weight(samples).log())

    def __call__(self, view: View, prepared: Any) -> Correction:
        return Correction(torch.ones_like(view.anchor), view.keep)
