"""Policy losses made for samples of another policy than the one that is trained: DPPO, TOPR, DRO and Kimi's penalty.

Ratios are taken against `algo.anchor`, whose default, mu, is the policy that sampled.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.corrections import Level, at_level
from rlsys.algo.losses import Figures, Loss, View

TINY = 1e-8
"""Keeps the logarithm of the other tokens' probability finite (verl's value)."""
ROUNDING = 1e-3
"""A ratio above 1 by less may be rounding: it is not counted as capped."""


def binary_kl(anchor: Tensor, logp: Tensor) -> Tensor:
    """KL(anchor || policy) between "this token" and "any other", from both log-probs `[T]`."""
    others, others_now = -torch.expm1(anchor), -torch.expm1(logp)
    return anchor.exp() * (anchor - logp) + others * ((others + TINY) / (others_now + TINY)).log()


class Dppo(Loss):
    """A trust region in probabilities instead of ratios: a token that moved too far its way loses its gradient.

    -sg(min(r, cap)) A logp; without gradient where A > 0 and the token's probability rose by more than `high`, or
    A <= 0 and it fell by more than `low`. `tv` measures |p - p_anchor|; `kl` the KL between this token and any other,
    for which 0.05 is usual. Unlike a clip of ratios it leaves unlikely tokens free and holds likely ones. prime-rl's
    default loss is `loss: [dppo, {name: kimi, tau: 0.002}]` with low = high = 0.2 and anchor mu.
    """

    paper: ClassVar[str] = "DPPO: divergence proximal policy optimisation (arXiv 2602.04879)"
    evidence: ClassVar[str] = "R"
    divergence: Literal["tv", "kl"] = "tv"
    """How the move is measured."""
    low: Annotated[float, Field(ge=0)] = 0.15
    """Largest move downwards."""
    high: Annotated[float, Field(ge=0)] = 0.15
    """Largest move upwards."""
    cap: Annotated[float, Field(gt=1)] = 20.0
    """Largest weight; the paper wants it large."""

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        logp, anchor = view.logp.detach(), view.anchor.detach()
        rise = logp.exp() - anchor.exp()
        up = view.advantages > 0
        if self.divergence == "tv":
            outside = torch.where(up, rise > self.high, rise < -self.low)
        else:
            away = binary_kl(anchor, logp)
            outside = torch.where(up, (away > self.high) & (rise > 0), (away > self.low) & (rise < 0))
        ratio = view.ratio.detach()
        weight = ratio.clamp(max=self.cap) * ~outside
        figures = {"clipped": outside, "capped_share": (~outside & (ratio > self.cap)).to(ratio)}
        return -weight * view.advantages * view.logp, figures


class Topr(Loss):
    """Tapered off-policy REINFORCE: good samples count in full, bad ones by at most their ratio.

    -A logp where A > 0, else -sg(min(r, 1)) A logp. r is the product over the response, as in the paper; ROLL takes
    each token's (`level: token`), and tells good from bad by the reward where we take the advantage.
    """

    paper: ClassVar[str] = "TOPR: tapered off-policy REINFORCE (arXiv 2503.14286), eq. 8"
    evidence: ClassVar[str] = "R"
    level: Level = "sequence"
    """What the ratio is taken over."""

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        ratio = at_level(view.log_ratio.detach(), view.batch, self.level)
        bad = view.advantages <= 0
        weight = torch.where(bad, ratio.clamp(max=1.0), torch.ones_like(ratio))
        figures = {"capped_share": (bad & (ratio > 1 + ROUNDING)).to(ratio)}
        return -weight * view.advantages * view.logp, figures


class Dro(Loss):
    """Direct reward optimisation: -A logp + beta / 2 (logp - anchor)^2, token by token, without ratio or clip.

    The square holds samples of advantage 0, too. Corrections weigh all of it; `loss: [reinforce, kimi]` is the same
    with the square outside of them.
    """

    paper: ClassVar[str] = "DRO: offline regularised RL (Richemond et al. 2024)"
    evidence: ClassVar[str] = "R"
    every_sample: ClassVar[bool] = True
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the square. verl has no default; this is ROLL's for the same formula (kimi15)."""

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        return -view.advantages * view.logp + self.beta / 2 * view.log_ratio**2, {}


class Kimi(Loss):
    """tau / 2 (logp - anchor)^2 on every token: a penalty for leaving the anchor, beside a policy loss.

    `loss: [reinforce, kimi]` is Kimi k1.5's objective, token by token as in ROLL (`kimi15`); beside dppo it is
    prime-rl's `kl_tau`, whose 1e-3 is a tau of 2e-3. No correction acts on it.
    """

    paper: ClassVar[str] = "Kimi k1.5, eq. 3 (arXiv 2501.12599); Kimi K2.5 (arXiv 2602.02276)"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    tau: Annotated[float, Field(ge=0)] = 0.1
    """Weight."""

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        return self.tau / 2 * view.log_ratio**2, {}
