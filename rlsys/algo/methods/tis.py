"""Truncated importance sampling (Yao et al. 2025)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlsys.algo.corrections import Correction, Level, Normalised, PositiveFloat, at_level
from rlsys.algo.losses import View


class Tis(Normalised):
    """Truncated importance weights: min(rho, cap), and at least `floor`.

    `level: sequence` uses the product over the sequence, `geometric` the geometric mean. `normalise` divides by the
    mean weight of the update's tokens, so that the weights do not change the scale of the loss.
    """

    paper: ClassVar[str] = (
        "Your efficient RL framework secretly brings you off-policy training (Yao et al. 2025)"
    )
    evidence: ClassVar[str] = "R"
    weighs: ClassVar[bool] = True
    cap: PositiveFloat = 2.0
    """Largest weight (8 at sequence level)."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight (slime: --tis-clip-low, 0.5 in its GLM-5.2 script)."""
    level: Level = "token"
    """Unit of the ratio."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.floor > self.cap:
            raise ValueError(f"floor = {self.floor}: expected at most cap = {self.cap}")
        return self

    def correct(self, view: View) -> Correction:
        weight = at_level(view.log_behaviour_ratio, view.batch, self.level).clamp(self.floor, self.cap)
        return Correction(weight, view.keep)
