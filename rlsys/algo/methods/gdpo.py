"""GDPO: group reward-decoupled normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, deviation, grpo
from rlsys.algo.batch import Samples
from rlsys.algo.plugin import REWARD_TOLERANCE
from rlsys.core.errors import UserError


def gdpo(
    rewards: Tensor, group_ids: Tensor, weights: Sequence[float] | None = None, eps: float = 1e-6
) -> Tensor:
    """Normalise each of the rewards `[N, R]` within groups, add them, then scale over all samples; `[N]`.

    a = sum_k w_k (r_k - mean_g) / (std_g + eps); the result is a / (std + eps). The mean of a over all samples is 0
    up to rounding and is not subtracted: otherwise groups of equal rewards would get an advantage. With one reward
    the result is GRPO's, without the scale.
    """
    if rewards.dim() == 1:
        rewards = rewards[:, None]
    kinds = rewards.shape[1]
    weights = [1.0] * kinds if weights is None else list(weights)
    if len(weights) != kinds:
        raise ValueError(f"weights has {len(weights)} entries; expected one for each of {kinds} rewards")
    parts = torch.stack([w * grpo(rewards[:, k], group_ids, eps) for k, w in enumerate(weights)])
    total = parts.sum(0)  # parts that cancel leave rounding errors
    total = torch.where(total.abs() > REWARD_TOLERANCE * parts.abs().sum(0), total, 0.0)
    return total if kinds == 1 else total / (deviation(total) + eps)


class Gdpo(Advantage):
    """Each of several rewards normalised in its group, added, then whitened over the step.

    With one reward it is GRPO. Whitening runs over samples (some implementations: over tokens).
    """

    paper: ClassVar[str] = "GDPO: group reward-decoupled normalisation"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    eps: Eps = 1e-6
    """Added to each standard deviation."""
    weights: Annotated[list[float], Field(min_length=1)] | None = None
    """Weights of the named rewards, in the alphabetical order of the names. Unset: 1."""

    def __call__(self, samples: Samples) -> Tensor:
        reward_count = 1 if samples.rewards.dim() == 1 else samples.rewards.shape[1]
        if self.weights is not None and len(self.weights) != reward_count:
            raise UserError(
                f"algo.advantage.weights = {self.weights}: {len(self.weights)} weights, but data.reward "
                f"gives {reward_count} rewards; expected one weight for each"
            )
        return gdpo(samples.rewards, samples.group_ids, self.weights, self.eps)
