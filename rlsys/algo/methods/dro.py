"""DRO: direct reward optimisation, offline regularised RL (Richemond et al. 2024)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class Dro(Loss):
    """Direct reward optimisation: -A logp + beta / 2 (logp - anchor)^2 for each token, without ratio and clip.

    Samples with advantage 0 have the square, too. Corrections weight the whole loss by exp(logp - mu). In
    `loss: [reinforce, kimi]`, the same formula as two terms, they do not weight the square.
    """

    paper: ClassVar[str] = "DRO: offline regularised RL (Richemond et al. 2024)"
    evidence: ClassVar[str] = "F"
    ratio: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    every_sample: ClassVar[bool] = True
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the square. The default is ROLL's for the same formula (kimi15); verl has none."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        return -view.advantages * view.logp + self.beta / 2 * view.log_ratio**2, {}
