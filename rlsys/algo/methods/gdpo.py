"""GDPO: group reward-decoupled normalisation of several named rewards."""

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
    """Normalise each reward within groups, add the results, and divide by their standard deviation over all samples.

    With a = sum_k w_k (r_k - mean_g) / (std_g + eps), the result is a / (std(a) + eps). The mean of a, which is 0 up
    to rounding, is not subtracted, because groups of equal rewards would get an advantage. For a single reward, the
    result is a without the division (GRPO).

    Args:
        rewards: r, `[N, R]`, or `[N]` for a single reward.
        group_ids: group of each sample, `[N]`.
        weights: w, one for each of the R rewards; None: 1.
        eps: added to each standard deviation.

    Returns:
        Advantages, `[N]`.

    Raises:
        ValueError: `weights` has another length than R.
    """
    if rewards.dim() == 1:
        rewards = rewards[:, None]
    count = rewards.shape[1]
    weights = [1.0] * count if weights is None else list(weights)
    if len(weights) != count:
        raise ValueError(f"weights has {len(weights)} entries; expected {count}, one for each reward")
    terms = torch.stack([w * grpo(rewards[:, k], group_ids, eps) for k, w in enumerate(weights)])
    total = terms.sum(0)
    # Terms that cancel leave rounding errors, which are set to 0.
    total = torch.where(total.abs() > REWARD_TOLERANCE * terms.abs().sum(0), total, 0.0)
    return total if count == 1 else total / (deviation(total) + eps)


class Gdpo(Advantage):
    """Normalise each named reward within its group, add the results, and scale them over the step.

    For a single reward the method is GRPO. The scale is the standard deviation over samples; some implementations use
    that over tokens.
    """

    paper: ClassVar[str] = "GDPO: group reward-decoupled normalisation"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    eps: Eps = 1e-6
    """Added to each standard deviation."""
    weights: Annotated[list[float], Field(min_length=1)] | None = None
    """Weights of the named rewards in alphabetical order of the names; null: 1."""

    def __call__(self, samples: Samples) -> Tensor:
        reward_count = 1 if samples.rewards.dim() == 1 else samples.rewards.shape[1]
        if self.weights is not None and len(self.weights) != reward_count:
            raise UserError(
                f"algo.advantage.weights = {self.weights}: expected {reward_count} weights, one for each reward of "
                "data.reward"
            )
        return gdpo(samples.rewards, samples.group_ids, self.weights, self.eps)
