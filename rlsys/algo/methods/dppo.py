"""DPPO: divergence proximal policy optimisation (arXiv 2602.04879).

The ratio is taken against `algo.anchor`, whose default, mu, is the policy that sampled.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View

TINY = 1e-8
"""Keeps the logarithm of the other tokens' probability finite (verl's value)."""


def binary_kl(anchor: Tensor, logp: Tensor) -> Tensor:
    """Compute KL(anchor || policy) between "this token" and "any other", from both log-probs `[T]`."""
    other_probs, other_probs_now = -torch.expm1(anchor), -torch.expm1(logp)
    return (
        anchor.exp() * (anchor - logp) + other_probs * ((other_probs + TINY) / (other_probs_now + TINY)).log()
    )


class Dppo(Loss):
    """A trust region in probabilities instead of ratios: a token whose probability moved too far has no gradient.

    -sg(min(r, cap)) A logp, without gradient where A > 0 and the token's probability rose by more than `high`, or
    A <= 0 and it fell by more than `low`. `tv` measures |p - p_anchor|; `kl` the KL between this token and any other,
    for which 0.05 is usual. Unlike a clip of ratios it bounds likely tokens rather than unlikely ones. prime-rl's
    default loss is `loss: [dppo, {name: kimi, tau: 0.002}]` with low = high = 0.2, no cap (1e9) and anchor mu.
    """

    paper: ClassVar[str] = "DPPO: divergence proximal policy optimisation (arXiv 2602.04879)"
    evidence: ClassVar[str] = "R"
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence from the anchor: total variation, or KL."""
    low: Annotated[float, Field(ge=0)] = 0.15
    """Largest move downwards."""
    high: Annotated[float, Field(ge=0)] = 0.15
    """Largest move upwards."""
    cap: Annotated[float, Field(gt=1)] = 20.0
    """Largest weight; the paper recommends a large one: 10 in the authors' code, 20 in verl, none in prime-rl."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.low == self.high == 0:
            raise ValueError(
                "low = high = 0: a token has no gradient after any movement; expected values such as 0.15 (tv)"
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
