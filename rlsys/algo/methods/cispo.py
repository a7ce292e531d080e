"""CISPO (MiniMax-M1, eq. 4 and 5)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class Cispo(Loss):
    """-sg(clip(r)) A logp: the clip bounds a weight, and every token keeps its gradient.

    So `clip_share` is 0; the metric `capped_share` is the share of tokens whose weight is clipped.
    """

    paper: ClassVar[str] = "MiniMax-M1 (CISPO), eq. 4-5"
    evidence: ClassVar[str] = "R"
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """The weight is at most 1 + clip_high."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The weight is at least 1 - clip_low; with the default of 1 there is no lower bound."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        ratio = view.ratio.detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * view.advantages * view.logp, {"capped_share": (weight != ratio).to(weight)}
