"""The policy's entropy: a bonus, a bonus that is steered, and training where it is largest; see covariance, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.losses import Figures, Loss, View
from rlsys.algo.reduction import Reduce, threshold
from rlsys.algo.selectors import Selector

GRID = 2.0**-10
"""Entropies are told apart to this, in nats: tokens of equal responses in a group stay or go together."""
MOST_NATS = 32.0
"""More than the entropy over any vocabulary."""


class EntropyBonus(Loss):
    """-coefficient times the policy's entropy at each token."""

    paper: ClassVar[str] = "Asynchronous methods for deep RL (Mnih et al. 2016)"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    coefficient: float = 1e-3
    """Weight; negative lowers the entropy."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def needs_before(self) -> frozenset[str]:
        return frozenset()

    def weight(self) -> float:
        """What the entropy is multiplied by."""
        return self.coefficient

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        if view.entropy is None:
            raise ValueError("the loss was called without the entropy, which the term 'entropy' needs")
        return -self.weight() * view.entropy, {}


class AdaptiveEntropy(EntropyBonus):
    """An entropy bonus only while entropy is at or below `target`, with a weight that is steered.

    After each optimizer update the weight rises by `delta` if the mean entropy of the update's tokens was at or below
    the target, else it falls by `delta`, within [lowest, highest]. The next update has the bonus only in the first
    case. The first update, before anything was measured, has it. Metric `entropy_coefficient`: what was applied. The
    checkpoint keeps both numbers.
    """

    paper: ClassVar[str] = "Skywork Open Reasoner 1 (He et al. 2025): adaptive entropy control"
    evidence: ClassVar[str] = "R"
    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight at the start."""
    target: Annotated[float, Field(ge=0)] = 0.2
    """Wanted entropy of a token, in nats."""
    delta: Annotated[float, Field(gt=0)] = 0.005
    """Change of the weight after an update."""
    lowest: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight."""
    highest: Annotated[float, Field(ge=0)] = 1.0
    """Largest weight."""
    _coefficient: float | None = PrivateAttr(default=None)
    _entropy: float = PrivateAttr(default=-math.inf)

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if not self.lowest <= self.coefficient <= self.highest:
            raise ValueError(
                f"coefficient = {self.coefficient} must be from lowest = {self.lowest} to highest = {self.highest}"
            )
        return self

    @property
    def _steered(self) -> float:
        return self.coefficient if self._coefficient is None else self._coefficient

    def weight(self) -> float:
        return self._steered if self._entropy <= self.target else 0.0

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        loss, _ = super().__call__(view, prepared)
        return loss, {"entropy_coefficient": loss.detach().new_full(loss.shape, self.weight())}

    def observe(self, metrics: dict[str, float]) -> None:
        entropy = metrics["entropy"]
        if math.isfinite(entropy):  # else the trainer skips that update as well
            change = self.delta if entropy <= self.target else -self.delta
            self._coefficient = min(max(self._steered + change, self.lowest), self.highest)
            self._entropy = entropy

    def state_dict(self) -> dict[str, Any]:
        return (
            {} if self._coefficient is None else {"coefficient": self._coefficient, "entropy": self._entropy}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._coefficient, self._entropy = float(state["coefficient"]), float(state["entropy"])


class TopEntropy(Selector):
    """Train only the tokens where the policy was least sure: the share of all tokens with the largest entropy.

    Of the whole step, as the trainer had it at its start; TRL takes the quantile of a micro-batch over ranks. All
    terms of the loss lose the other tokens, also the KL to a reference, which TRL leaves. Denominators count all.
    """

    paper: ClassVar[str] = "Beyond the 80/20 rule: high-entropy minority tokens (Wang et al. 2025)"
    evidence: ClassVar[str] = "R"
    every_sample: ClassVar[bool] = True
    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the tokens that are trained."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        entropies = [(part.masked(part.signal("entropy").detach()) / GRID).round() * GRID for part in parts]
        trained = [e[p.keep & (p.signal("weight") != 0)] for e, p in zip(entropies, parts, strict=True)]
        count = torch.tensor(
            float(sum(len(t) for t in trained)), dtype=torch.float64, device=parts[0].mu.device
        )
        dropped = math.ceil((1 - self.share) * (float(reduce(count)) - 1) - 1e-9)
        cut = threshold(trained, lambda edges, counts, sums: counts <= dropped, -1.0, MOST_NATS, reduce)
        return [(entropy > cut).to(entropy) for entropy in entropies]
