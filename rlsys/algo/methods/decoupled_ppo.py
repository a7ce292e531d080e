"""Decoupled PPO: separate proximal and behaviour policies (Hilton et al. 2022; AReaL, eq. 5)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from rlsys.algo.corrections import Correction, CorrectionPlugin, PositiveFloat
from rlsys.algo.losses import View


class DecoupledPPO(CorrectionPlugin):
    """Decoupled PPO: the clip is around a recent anchor, and the ratio of the anchor to mu is a weight.

    w = rho = exp(anchor - mu), clamped to cap ("clamp") or rejected above it ("mask"). The anchor is the config's
    `algo.anchor`: old (recomputed), behaviour (exact), interpolated (mu + alpha (logp - mu)), ewma.
    """

    paper: ClassVar[str] = "AReaL, eq. 5; Batch size-invariance for policy optimisation (Hilton et al. 2022)"
    evidence: ClassVar[str] = "R"
    of_anchor: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    cap: PositiveFloat = 5.0
    """Largest weight."""
    above: Literal["clamp", "mask"] = "mask"
    """Treatment of a token above `cap`: its weight is clamped, or the token is masked."""

    def __call__(self, view: View, update_stats: Any) -> Correction:
        rho = view.log_behaviour_ratio.exp()
        keep = view.keep if self.above == "clamp" else view.keep & (rho <= self.cap)
        return Correction(rho.clamp(max=self.cap), keep)
