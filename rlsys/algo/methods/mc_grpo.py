"""MC-GRPO in the trainer: median-centred advantages; mc_grpo_groups.py has the group size."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, by_group, middle
from rlsys.algo.batch import Samples


class McGrpo(Advantage):
    """(R - median) / (MAD + eps) in odd groups of G + 1 samples; the median sample has advantage 0.

    Non-zero advantages are multiplied by (G + 1) / (number of non-zero ones), because the mean over all samples
    counts the zeros; with `over: active` the reducer would compensate a second time. With rewards of 0 and 1 the MAD
    is 0 in every group, so that all mixed groups have the same weight, as in the authors' code. Their eps is 1e-3,
    with which advantages are a thousand times larger than with eps = 1 and gradient clipping determines the size of
    a step. Use `planners: [mc_grpo]` for odd groups.
    """

    paper: ClassVar[str] = "MC-GRPO: median-centred GRPO"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "R"
    eps: Annotated[float, Field(gt=0)] = 1.0
    """Added to the MAD."""

    def __call__(self, samples: Samples) -> Tensor:
        def group(rewards: Tensor) -> Tensor:
            n = len(rewards)
            if n % 2 == 0:
                raise ValueError(
                    f"algo.advantage mc_grpo: a group has {n} samples; expected an odd number (algo.planners: "
                    "mc_grpo)"
                )
            distance = rewards - middle(rewards.sort().values)
            scaled = distance / (middle(distance.abs().sort().values) + self.eps)
            return scaled * n / max(int((scaled != 0).sum()), 1)

        return by_group(group, samples.reward, samples.group_ids)
