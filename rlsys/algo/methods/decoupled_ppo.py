"""Decoupled PPO: a proximal policy that differs from the behaviour policy (Hilton et al. 2022; AReaL, eq. 5)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from rlsys.algo.corrections import Correction, CorrectionPlugin, PositiveFloat
from rlsys.algo.losses import View


class DecoupledPPO(CorrectionPlugin):
    """Decoupled PPO: the loss clips the ratio to a recent anchor, and the ratio of the anchor to mu is a weight.

    The weight is rho = exp(anchor - mu). A token with a weight above `cap` gets the weight `cap` (`above: clamp`) or
    is rejected (`above: mask`). `algo.anchor` is the anchor: old (recomputed), behaviour (exact), interpolated (mu +
    alpha (logp - mu)) or ewma.
    """

    paper: ClassVar[str] = "AReaL, eq. 5; Batch size-invariance for policy optimisation (Hilton et al. 2022)"
    evidence: ClassVar[str] = "R"
    of_anchor: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    cap: PositiveFloat = 5.0
    """Largest weight."""
    above: Literal["clamp", "mask"] = "mask"
    """Treatment of a token with a weight above `cap`. clamp: it gets the weight `cap`. mask: it is rejected."""

    def __call__(self, view: View, update_stats: Any) -> Correction:
        rho = view.log_behaviour_ratio.exp()
        keep = view.keep if self.above == "clamp" else view.keep & (rho <= self.cap)
        return Correction(rho.clamp(max=self.cap), keep)
