"""Pass@k objectives (Language models for inference time objectives, arXiv 2503.19595)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_std, groups_of


class GrpoPassK(Advantage):
    """Train only the best sample of a group, which estimates the gradient of pass@(group size).

    The advantage of the best sample is (largest R - second largest R) / (std + eps), which is 0 for a tie. All other
    samples have advantage 0.
    """

    paper: ClassVar[str] = (
        "Language models for inference time objectives (arXiv 2503.19595); verl core_algos.py"
    )
    evidence: ClassVar[str] = "F"
    compares: ClassVar[bool] = True
    scale: bool = True
    """Whether the advantage is divided by the group's standard deviation."""
    eps: Eps = 1e-6
    """Added to the standard deviation."""

    def __call__(self, samples: Samples) -> Tensor:
        rewards = samples.reward
        lead = torch.zeros_like(rewards)
        for members in groups_of(samples.group_ids):
            if len(members) > 1:
                best = rewards[members].topk(2)
                lead[members[best.indices[0]]] = best.values[0] - best.values[1]
        return lead / (group_std(rewards, samples.group_ids) + self.eps) if self.scale else lead
