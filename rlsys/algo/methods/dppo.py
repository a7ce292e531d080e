"""DPPO: divergence proximal policy optimisation (arXiv 2602.04879)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View

TINY = 1e-8
"""Added to the probability of the other tokens, so that its logarithm is finite (verl's value)."""


def binary_kl(anchor: Tensor, logp: Tensor) -> Tensor:
    """Compute KL(anchor || policy) of the distribution over "this token" and "any other token", `[T]`.

    Args:
        anchor: log-probs of the anchor, `[T]`.
        logp: log-probs of the policy, `[T]`.
    """
    other_anchor, other_policy = -torch.expm1(anchor), -torch.expm1(logp)
    return (
        anchor.exp() * (anchor - logp) + other_anchor * ((other_anchor + TINY) / (other_policy + TINY)).log()
    )


class Dppo(Loss):
    """A trust region on probabilities instead of ratios: a token whose probability changed too much has no gradient.

    The loss is -sg(min(r, cap)) A logp, where sg stops the gradient. A token has no gradient if A > 0 and its
    probability p rose by more than `high`, or if A <= 0 and p fell by more than `low`. The change is |p - p_anchor|
    (`divergence: tv`), or the KL divergence over "this token" and "any other token" (`kl`), for which 0.05 is a usual
    limit. A clip of ratios limits unlikely tokens most; this trust region limits likely tokens most. prime-rl's
    default loss is `loss: [dppo, {name: kimi, tau: 0.002}]` with low = high = 0.2, no cap (1e9) and anchor mu.
    """

    paper: ClassVar[str] = "DPPO: divergence proximal policy optimisation (arXiv 2602.04879)"
    evidence: ClassVar[str] = "R"
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence from the anchor. tv: total variation. kl: KL divergence."""
    low: Annotated[float, Field(ge=0)] = 0.15
    """Largest divergence of a token with A <= 0 whose probability fell."""
    high: Annotated[float, Field(ge=0)] = 0.15
    """Largest divergence of a token with A > 0 whose probability rose."""
    cap: Annotated[float, Field(gt=1)] = 20.0
    """Largest ratio in the weight. The paper recommends a large one: 10 in the authors' code, 20 in verl, none in
    prime-rl."""

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        if self.low == self.high == 0:
            raise ValueError(
                "low = high = 0: a token whose probability changed has no gradient; expected values such as 0.15"
            )
        return self

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        logp, anchor = view.logp.detach(), view.anchor.detach()
        rise = logp.exp() - anchor.exp()
        up = view.advantages > 0
        if self.divergence == "tv":
            outside = torch.where(up, rise > self.high, rise < -self.low)
        else:
            divergence = binary_kl(anchor, logp)
            outside = torch.where(
                up, (divergence > self.high) & (rise > 0), (divergence > self.low) & (rise < 0)
            )
        ratio = view.ratio.detach()
        weight = ratio.clamp(max=self.cap) * ~outside
        figures = {"clipped": outside, "capped_share": (~outside & (ratio > self.cap)).to(ratio)}
        return -weight * view.advantages * view.logp, figures
