"""DRO: offline regularised RL (Richemond et al. 2024).

The ratio is taken against `algo.anchor`, whose default, mu, is the policy that sampled.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class Dro(Loss):
    """Direct reward optimisation: -A logp + beta / 2 (logp - anchor)^2, token by token, without ratio or clip.

    The square also applies to samples of advantage 0. Corrections weight the whole term by exp(logp - mu); in
    `loss: [reinforce, kimi]` they do not weight the square.
    """

    paper: ClassVar[str] = "DRO: offline regularised RL (Richemond et al. 2024)"
    evidence: ClassVar[str] = "F"
    ratio: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    every_sample: ClassVar[bool] = True
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the square. verl has no default; the default is ROLL's for the same formula (kimi15)."""

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        return -view.advantages * view.logp + self.beta / 2 * view.log_ratio**2, {}
