"""OPO: on-policy RL with optimal reward baseline (arXiv 2505.23585)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rlsys.algo.advantages import Advantage, dr_grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_index, sum_by


class Opo(Advantage):
    """R - sum(l R) / sum(l) within the group, where l is the length of a response.

    This baseline minimises the variance of the gradient if the squared gradient norm of a response is proportional to
    its length. OPO is for exactly on-policy steps without clip, KL or entropy terms.
    """

    paper: ClassVar[str] = (
        "On-policy RL with optimal reward baseline (OPO, arXiv 2505.23585), the authors' microsoft/LMOps opo"
    )
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Tensor:
        # Relative to the mean, so that equal rewards give exactly 0.
        centred = dr_grpo(samples.reward, samples.group_ids).double()
        index, sizes = group_index(samples.group_ids)
        lengths = samples.lengths.to(centred)
        weighted_sum = sum_by(lengths * centred, index, len(sizes))
        total = sum_by(lengths, index, len(sizes)).clamp(min=1)
        return (centred - (weighted_sum / total)[index]).to(samples.reward.dtype)
