"""GAPO: group adaptive policy optimisation, with a baseline that ignores outliers."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, by_group, middle
from rlsys.algo.batch import Samples
from rlsys.algo.plugin import REWARD_TOLERANCE


def dense_centre(rewards: Tensor, share: float) -> Tensor:
    """Return the median of the ceil(share n) neighbours in the sorted rewards `[n]` that have the smallest range.

    If several ranges are equal up to rounding, the lowest neighbours count.
    """
    k = max(1, math.ceil(share * len(rewards)))
    sorted_rewards = rewards.sort().values
    ranges = sorted_rewards[k - 1 :] - sorted_rewards[: len(sorted_rewards) - k + 1]
    start = int((ranges <= ranges.min() + REWARD_TOLERANCE * rewards.abs().max()).int().argmax())
    return middle(sorted_rewards[start : start + k])


class Gapo(Advantage):
    """(R - Q) / scale, where Q is the median of the densest part of the group's rewards and ignores outliers.

    The densest part is the ceil(tau n) neighbours in the sorted rewards with the smallest range. For an even number,
    Q is the mean of the two middle ones. The scale is sqrt(sum (R - Q)^2 / (n - 1)) + eps.
    """

    paper: ClassVar[str] = "GAPO: group adaptive policy optimisation"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    tau: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the group's samples in the densest part."""
    eps: Eps = 1e-6
    """Added to the scale."""

    def __call__(self, samples: Samples) -> Tensor:
        def group_advantages(rewards: Tensor) -> Tensor:
            """Return the advantages of a group, `[n]`."""
            distance = rewards - dense_centre(rewards, self.tau)
            return distance / ((distance**2).sum() / max(len(rewards) - 1, 1)).sqrt().add(self.eps)

        return by_group(group_advantages, samples.reward, samples.group_ids)
