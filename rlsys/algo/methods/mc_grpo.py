"""MC-GRPO's median-centred advantages. The planner that makes group sizes odd is in mc_grpo_groups.py."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, by_group, middle
from rlsys.algo.batch import Samples


class McGrpo(Advantage):
    """(R - median) / (MAD + eps) in groups with an odd number n of samples; the median sample has advantage 0.

    MAD is the median of |R - median|. Non-zero advantages are multiplied by n / (number of non-zero ones), because
    the mean over all samples counts the zeros; with `over: active` the reducer would compensate a second time. With
    rewards of 0 and 1 the MAD is 0, so all groups with both rewards have the same weight, as in the authors' code.
    The authors' eps is 1e-3; advantages are then a thousand times larger than with eps = 1, and gradient clipping
    determines the size of a step. `planners: [mc_grpo]` makes the number of samples odd.
    """

    paper: ClassVar[str] = "MC-GRPO: median-centred GRPO"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "R"
    eps: Annotated[float, Field(gt=0)] = 1.0
    """Added to the MAD."""

    def __call__(self, samples: Samples) -> Tensor:
        def group_advantages(rewards: Tensor) -> Tensor:
            """Return the advantages of a group, `[n]`."""
            n = len(rewards)
            if n % 2 == 0:
                raise ValueError(
                    f"algo.advantage mc_grpo: a group has {n} samples; expected an odd number, for example from "
                    "algo.planners = [mc_grpo]"
                )
            distance = rewards - middle(rewards.sort().values)
            scaled = distance / (middle(distance.abs().sort().values) + self.eps)
            return scaled * n / max(int((scaled != 0).sum()), 1)

        return by_group(group_advantages, samples.reward, samples.group_ids)
