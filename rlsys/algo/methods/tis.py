"""Truncated importance sampling (Yao et al. 2025)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from rlsys.algo.corrections import Correction, Level, Normalised, PositiveFloat, at_level
from rlsys.algo.losses import View


class Tis(Normalised):
    """Truncated importance weights: rho, aggregated over `level`, limited to [floor, cap].

    `normalise` divides the weights by their mean over the update's tokens, so that the weights do not change the
    scale of the loss.
    """

    paper: ClassVar[str] = (
        "Your efficient RL framework secretly brings you off-policy training (Yao et al. 2025)"
    )
    evidence: ClassVar[str] = "R"
    weighs: ClassVar[bool] = True
    cap: PositiveFloat = 2.0
    """Largest weight; 8 is usual for `level: sequence`."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight (slime: --tis-clip-low, 0.5 in its GLM-5.2 script)."""
    level: Level = "token"
    """Aggregation of rho: token, sequence (product) or geometric (geometric mean of a sequence)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.floor > self.cap:
            raise ValueError(f"floor = {self.floor}: expected at most cap = {self.cap}")
        return self

    def correct(self, view: View) -> Correction:
        weight = at_level(view.log_behaviour_ratio, view.batch, self.level).clamp(self.floor, self.cap)
        return Correction(weight, view.keep)
