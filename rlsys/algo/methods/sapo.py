"""SAPO: soft adaptive policy optimisation, with a smooth gate instead of a clip."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class Sapo(Loss):
    """-(4 / tau) sigmoid(tau (r - 1)) A: a smooth gate instead of a clip.

    At r = 1 the gradient is that of -r A. tau is larger for A <= 0, so the gate is narrower there.
    """

    paper: ClassVar[str] = "Soft adaptive policy optimisation (SAPO)"
    evidence: ClassVar[str] = "R"
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the gate where A > 0."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Temperature of the gate where A <= 0."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        tau = torch.where(view.advantages > 0, self.tau_positive, self.tau_negative).to(view.ratio)
        return -(4 / tau) * torch.sigmoid(tau * (view.ratio - 1)) * view.advantages, {}
