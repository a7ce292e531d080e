"""The policy loss of Kimi k1.5 (arXiv 2501.12599) and Kimi K2.5 (arXiv 2602.02276)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class Kimi(Loss):
    """tau / 2 (logp - anchor)^2 for each token: a penalty on the distance from the anchor, added to a policy loss.

    `loss: [reinforce, kimi]` is the objective of Kimi k1.5, for each token as in ROLL (`kimi15`). `loss: [dppo,
    kimi]` is the objective of prime-rl, whose `kl_tau` is tau / 2. Corrections do not apply to this term.
    """

    paper: ClassVar[str] = "Kimi k1.5, eq. 3 (arXiv 2501.12599); Kimi K2.5 (arXiv 2602.02276)"
    evidence: ClassVar[str] = "F"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    tau: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the penalty."""

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return torch.full_like(advantages, self.tau != 0, dtype=torch.bool)

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        return self.tau / 2 * view.log_ratio**2, {}
