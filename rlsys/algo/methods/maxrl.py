"""MaxRL: maximum likelihood reinforcement learning (arXiv 2602.02710)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage, dr_grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_mean


class MaxRL(Advantage):
    """(R - mean) / mean within the group: the gradient of a likelihood, in which a success has weight 1 / p.

    With n samples of rewards 0 and 1, it is an unbiased estimate of the gradient of the n-th order approximation of
    maximum likelihood; n = 1 is REINFORCE. Rewards should be at least 0: a group whose mean is not above 0 has
    advantages of 0. The authors divide by the mean in this case, too, so a negative mean inverts the sign of the
    advantages.
    """

    paper: ClassVar[str] = (
        "Maximum likelihood reinforcement learning (MaxRL, arXiv 2602.02710); prime-rl max_rl.py"
    )
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Tensor:
        mean = group_mean(samples.reward, samples.group_ids)
        centred = dr_grpo(samples.reward, samples.group_ids)
        return torch.where(mean > 0, centred / torch.where(mean > 0, mean, 1.0), 0.0)
