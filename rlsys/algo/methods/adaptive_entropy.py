"""Adaptive entropy control (Skywork Open Reasoner 1, He et al. 2025)."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from rlsys.algo.entropy import EntropyBonus
from rlsys.algo.losses import Figures, View


class AdaptiveEntropy(EntropyBonus):
    """An entropy bonus that applies only while the entropy is at most `target`, with an adaptive weight.

    After each optimizer update, the mean entropy of the update's tokens is compared with the target:
    - at most the target: the weight rises by `delta`, to at most `highest`, and the next update has the bonus;
    - above the target: the weight falls by `delta`, to at least `lowest`, and the next update has no bonus.

    The first update of a run has the bonus. The metric `entropy_coefficient` is the weight of the update, 0 without
    the bonus. Checkpoints store the weight and the last entropy.
    """

    paper: ClassVar[str] = "Skywork Open Reasoner 1 (He et al. 2025): adaptive entropy control"
    evidence: ClassVar[str] = "R"
    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight at the start."""
    target: Annotated[float, Field(ge=0)] = 0.2
    """Target entropy per token, in nats."""
    delta: Annotated[float, Field(gt=0)] = 0.005
    """Change of the weight after each update."""
    lowest: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight."""
    highest: Annotated[float, Field(ge=0)] = 1.0
    """Largest weight."""
    _coefficient: float | None = PrivateAttr(default=None)
    _entropy: float = PrivateAttr(default=-math.inf)

    @model_validator(mode="after")
    def _check_coefficient(self) -> Self:
        if not self.lowest <= self.coefficient <= self.highest:
            raise ValueError(
                f"coefficient = {self.coefficient}: expected lowest = {self.lowest} to highest = {self.highest}"
            )
        return self

    @property
    def _current_weight(self) -> float:
        return self.coefficient if self._coefficient is None else self._coefficient

    def weight(self) -> float:
        return self._current_weight if self._entropy <= self.target else 0.0

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        """Return true for all tokens if the weight can be above 0, because only an update can raise it from 0."""
        return torch.full_like(advantages, self.highest > 0, dtype=torch.bool)

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        loss, _ = super().__call__(view, update_stats)
        return loss, {"entropy_coefficient": loss.detach().new_full(loss.shape, self.weight())}

    def observe(self, metrics: dict[str, float]) -> None:
        entropy = metrics["entropy"]
        if math.isfinite(entropy):  # otherwise the trainer skips that update as well
            change = self.delta if entropy <= self.target else -self.delta
            self._coefficient = min(max(self._current_weight + change, self.lowest), self.highest)
            self._entropy = entropy

    def state_dict(self) -> dict[str, Any]:
        if self._coefficient is None:
            return {}
        return {"coefficient": self._coefficient, "entropy": self._entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._coefficient = float(state["coefficient"])
        self._entropy = float(state["entropy"])
