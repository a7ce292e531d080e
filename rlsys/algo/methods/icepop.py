"""IcePop: masked importance sampling (Ring-1T technical report)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator

from rlsys.algo.corrections import Correction, Level, Normalised, PositiveFloat, at_level
from rlsys.algo.losses import View
from rlsys.algo.segments import sum_by


class IcePop(Normalised):
    """Reject tokens with rho outside [low, high], weight the others by rho (IcePop; masked importance sampling).

    `geometric` with bounds like 0.9999 and 1.0001 rejects whole sequences by their mean. `veto` rejects a sequence
    if one of its tokens has a smaller rho. `normalise` divides by the mean weight of the kept tokens, so that
    rejections do not scale up the others.
    """

    paper: ClassVar[str] = "IcePop (Ring-1T technical report); masked importance sampling"
    evidence: ClassVar[str] = "R"
    low: PositiveFloat = 0.5
    """Smallest ratio kept."""
    high: PositiveFloat = 2.0
    """Largest ratio kept (5 in some reports)."""
    level: Level = "token"
    """Unit of the ratio."""
    weighted: bool = True
    """Multiply kept tokens by rho. false: reject only."""
    veto: Annotated[float, Field(ge=0)] = 0.0
    """Reject the whole sequence if a token's ratio is below this (usually 1e-4); 0: off."""

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        return self.weighted

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"low = {self.low}: expected less than high = {self.high}; no token would be kept"
            )
        return self

    def correct(self, view: View) -> Correction:
        batch, log_rho = view.batch, view.log_behaviour_ratio
        ratio = at_level(log_rho, batch, self.level)
        keep = view.keep & (ratio >= self.low) & (ratio <= self.high)
        if self.veto:
            bad = (batch.keep & (log_rho.exp() < self.veto)).to(log_rho.dtype)
            keep = keep & (sum_by(bad, batch.ids, batch.sequences) == 0)[batch.ids]
        return Correction(ratio if self.weighted else torch.ones_like(ratio), keep)
