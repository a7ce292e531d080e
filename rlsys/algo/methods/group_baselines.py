"""Other baselines and scales for the rewards of a group than GRPO's mean and deviation.

Shapes: N samples, G groups. Each of them gives exactly 0 to a group of equal rewards.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, deviation, dr_grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_index, group_mean, group_std, groups_of, sum_by


class LitePPO(Advantage):
    """(R - mean of the group) / (std of the whole step + eps): TRL's `scale_rewards: batch`.

    The deviation is that of all the step's rewards, with n - 1. A group of nearly equal rewards is then not blown up
    by its own small deviation. The paper's other half is the mean over tokens: `reducer: token_mean`.
    """

    paper: ClassVar[str] = (
        "Tricks or traps? A deep dive into RL for LLM reasoning (Lite PPO); TRL grpo_trainer.py"
    )
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    eps: Eps = 1e-4
    """Added to the standard deviation."""

    def __call__(self, samples: Samples) -> Tensor:
        return dr_grpo(samples.reward, samples.group_ids) / (deviation(samples.reward) + self.eps)


class MaxRL(Advantage):
    """(R - mean) / mean within the group: the gradient of a likelihood, which weighs rare successes by 1 / p.

    With n samples of rewards 0 and 1 it is unbiased for the n-th order of maximum likelihood: n = 1 is REINFORCE.
    Rewards should not be negative; a group whose mean is not above 0 gets 0.
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


class Opo(Advantage):
    """R - sum(l R) / sum(l) within the group, l the responses' lengths: the baseline of least variance.

    It is the optimal baseline if a response's squared gradient norm grows like its length. OPO is meant for exactly
    on-policy steps: without clip, KL or entropy terms.
    """

    paper: ClassVar[str] = (
        "On-policy RL with optimal reward baseline (OPO, arXiv 2505.23585); verl core_algos.py"
    )
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Tensor:
        # Of what is left after the mean, so that equal rewards give exactly 0.
        centred = dr_grpo(samples.reward, samples.group_ids).double()
        index, sizes = group_index(samples.group_ids)
        lengths = samples.lengths.to(centred)
        weighed = sum_by(lengths * centred, index, len(sizes))
        total = sum_by(lengths, index, len(sizes)).clamp(min=1)
        return (centred - (weighed / total)[index]).to(samples.reward.dtype)


class GrpoPassK(Advantage):
    """Only the best sample of a group counts, by its lead over the second best: a gradient of pass@k, k = the group.

    A = (largest R - second largest R) / (std + eps) for the best sample, 0 for all others and for a tie at the top.
    """

    paper: ClassVar[str] = (
        "Language models for inference time objectives (arXiv 2503.19595); verl core_algos.py"
    )
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    scale: bool = True
    """Divide by the group's standard deviation."""
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


class Gpg(Advantage):
    """alpha (R - mean) / f_norm, where alpha makes up for samples that give no gradient: use `loss: [reinforce]`.

    alpha = N / (samples that count), over the step. `rewarded` counts samples whose reward is not 0, as verl does;
    `mixed` those of groups whose rewards differ, which is what second-hand accounts of the paper say (the authors'
    code was not found). With rewards of 0 and 1, `rewarded` is 1 / (mean reward).
    """

    paper: ClassVar[str] = "Group policy gradient (GPG, arXiv 2504.02546); verl core_algos.py"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    counts: Literal["rewarded", "mixed"] = "rewarded"
    """Which samples count."""
    f_norm: Annotated[float, Field(gt=0)] = 1.0
    """Divides the advantages."""

    def __call__(self, samples: Samples) -> Tensor:
        centred = dr_grpo(samples.reward, samples.group_ids)
        if self.counts == "rewarded":
            counted = (samples.reward != 0).sum()
        else:
            counted = (group_std(samples.reward, samples.group_ids) > 0).sum()
        return len(samples) / counted.clamp(min=1) * centred / self.f_norm
