"""XRPO in the trainer: advantage sharpening; xrpo_groups.py has the allocation of rollouts."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage, NonNegativeFloat, grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_index, sum_by


class Xrpo(Advantage):
    """GRPO with more weight on correct samples that were unlikely: novelty-sharpened advantages.

    For correct samples with mean log-prob s and eta = exp(s - mean_g s): A += min(max(lam (1 - eta), 0), kappa A). s
    is the engine's log-prob under the prompt that it sampled from. Samples that follow solved problems (planner
    xrpo) are likely under that prompt, so they get no bonus and are not in the mean. lam and kappa are the paper's.
    """

    paper: ClassVar[str] = "XRPO, advantage sharpening"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "P"
    lam: NonNegativeFloat = 2.5
    """Size of the bonus."""
    kappa: NonNegativeFloat = 0.5
    """Largest bonus as a share of the advantage."""
    correct: float = 0.5
    """A sample is correct when its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def __call__(self, samples: Samples) -> Tensor:
        base = grpo(samples.reward, samples.group_ids)
        score = samples.column("log_likelihood").to(base)
        original = ~samples.column("transferred").bool()
        index, sizes = group_index(samples.group_ids)
        total = sum_by(torch.where(original, score, 0.0).double(), index, len(sizes))
        mean = total / sum_by(original.double(), index, len(sizes)).clamp(min=1)
        eta = (score - mean[index].to(score)).clamp(max=20).exp()
        bonus = torch.minimum((self.lam * (1 - eta)).clamp(min=0), self.kappa * base.clamp(min=0))
        return torch.where((samples.reward > self.correct) & original, base + bonus, base)
