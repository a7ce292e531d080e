"""GAPO: group adaptive policy optimisation."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, by_group, middle
from rlsys.algo.batch import Samples
from rlsys.algo.plugin import REWARD_TOLERANCE


def dense_centre(rewards: Tensor, share: float) -> Tensor:
    """Return the median of the ceil(share n) sorted neighbours with the smallest range.

    If ranges are equal up to rounding, the lower neighbours are used.
    """
    k = max(1, math.ceil(share * len(rewards)))
    sorted_rewards = rewards.sort().values
    ranges = sorted_rewards[k - 1 :] - sorted_rewards[: len(sorted_rewards) - k + 1]
    start = int((ranges <= ranges.min() + REWARD_TOLERANCE * rewards.abs().max()).int().argmax())
    return middle(sorted_rewards[start : start + k])


class Gapo(Advantage):
    """(R - Q) / rms(R - Q): Q, the median of the densest part of the group's rewards, ignores outliers.

    Q is the median of the ceil(tau n) sorted rewards with the smallest range; the scale is
    sqrt(sum (R - Q)^2 / (n - 1)). For an even window we take the mean of the two middle values.
    """

    paper: ClassVar[str] = "GAPO: group adaptive policy optimisation"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    tau: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the group in the window."""
    eps: Eps = 1e-6
    """Added to the scale."""

    def __call__(self, samples: Samples) -> Tensor:
        def group(rewards: Tensor) -> Tensor:
            distance = rewards - dense_centre(rewards, self.tau)
            return distance / ((distance**2).sum() / max(len(rewards) - 1, 1)).sqrt().add(self.eps)

        return by_group(group, samples.reward, samples.group_ids)
