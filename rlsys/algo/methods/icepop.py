"""IcePop: masked importance sampling (Ring-1T technical report)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator

from rlsys.algo.corrections import Correction, Level, Normalised, PositiveFloat, at_level
from rlsys.algo.losses import View
from rlsys.algo.segments import sum_by


class IcePop(Normalised):
    """Reject tokens whose ratio is outside [low, high], and weight the others by it (masked importance sampling).

    The ratio is rho, aggregated over `level`. `level: geometric` with bounds such as 0.9999 and 1.0001 rejects whole
    sequences. `veto` also rejects whole sequences. `normalise` divides the weights by the mean weight of the tokens
    that are not rejected, so that the weights do not change the scale of the loss.
    """

    paper: ClassVar[str] = "IcePop (Ring-1T technical report); masked importance sampling"
    evidence: ClassVar[str] = "R"
    low: PositiveFloat = 0.5
    """Smallest ratio that is not rejected."""
    high: PositiveFloat = 2.0
    """Largest ratio that is not rejected (5 in some reports)."""
    level: Level = "token"
    """Aggregation of rho: token, sequence (product) or geometric (geometric mean of a sequence)."""
    weighted: bool = True
    """Whether tokens that are not rejected are weighted by the ratio."""
    veto: Annotated[float, Field(ge=0)] = 0.0
    """Smallest rho of a token without rejection of its whole sequence (usually 1e-4); 0: no such rejection."""

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        return self.weighted

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"low = {self.low}: expected less than high = {self.high}; otherwise all tokens are rejected"
            )
        return self

    def correct(self, view: View) -> Correction:
        batch, log_rho = view.batch, view.log_behaviour_ratio
        ratio = at_level(log_rho, batch, self.level)
        keep = view.keep & (ratio >= self.low) & (ratio <= self.high)
        if self.veto:
            vetoes = (batch.keep & (log_rho.exp() < self.veto)).to(log_rho.dtype)
            keep = keep & (sum_by(vetoes, batch.ids, batch.sequences) == 0)[batch.ids]
        return Correction(ratio if self.weighted else torch.ones_like(ratio), keep)
