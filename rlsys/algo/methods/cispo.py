"""CISPO (MiniMax-M1, eq. 4 and 5)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class Cispo(Loss):
    """-sg(clip(r)) A logp, where sg stops the gradient: a clipped ratio is the weight of a token.

    Every token has a gradient, so the metric `clip_share` is 0. The metric `capped_share` is the share of tokens
    whose weight is clipped.
    """

    paper: ClassVar[str] = "MiniMax-M1 (CISPO), eq. 4-5"
    evidence: ClassVar[str] = "R"
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Largest weight minus 1."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    """1 minus the smallest weight; 1: no lower bound."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        ratio = view.ratio.detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * view.advantages * view.logp, {"capped_share": (weight != ratio).to(weight)}
