"""Loss term that rewards the entropy of the policy.

Related methods: methods/adaptive_entropy.py, methods/top_entropy.py and methods/entropy_mechanism.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class EntropyBonus(Loss):
    """Entropy bonus: -coefficient times the policy's entropy at each token."""

    paper: ClassVar[str] = "Asynchronous methods for deep RL (Mnih et al. 2016)"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    coefficient: float = 1e-3
    """Weight of the entropy. A negative weight lowers the entropy."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def needs_before(self) -> frozenset[str]:
        return frozenset()

    def weight(self) -> float:
        """Return the current weight of the entropy."""
        return self.coefficient

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return torch.full_like(advantages, self.weight() != 0, dtype=torch.bool)

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        if view.entropy is None:
            raise ValueError(
                "entropy = None; expected the policy's entropy, which the loss term 'entropy' needs"
            )
        return -self.weight() * view.entropy, {}
