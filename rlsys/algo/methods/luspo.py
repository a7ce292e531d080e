"""LUSPO: length-unbiased sequence policy optimisation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, View, Width
from rlsys.algo.methods.gspo import Gspo


class Luspo(Gspo):
    """GSPO times the length of the response, so a token has the gradient s A instead of s A / |y|.

    GSPO gives tokens of long responses less weight, which makes responses shorter. Use `reducer: sequence_mean` as
    for GSPO, because the loss itself contains the length.
    """

    paper: ClassVar[str] = "LUSPO: length-unbiased sequence policy optimisation"
    evidence: ClassVar[str] = "R"
    clip_low: Width = 2e-3
    """Clip width of the response's ratio s below 1."""
    clip_high: Annotated[float, Field(ge=0)] = 2.5e-3
    """Clip width of s above 1."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        loss, figures = super().__call__(view, update_stats)
        return loss * view.sample_lengths, figures
