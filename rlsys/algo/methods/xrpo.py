"""XRPO's advantage sharpening. The planner of XRPO is in xrpo_groups.py."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage, NonNegativeFloat, grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_index, sum_by


class Xrpo(Advantage):
    """GRPO's advantage plus a bonus for correct samples that were unlikely.

    The bonus is min(max(lam (1 - eta), 0), kappa A) with eta = exp(s - mean_g s), where s is the mean log-prob of the
    response's tokens in the engine. Samples whose prompt contains solved problems (planner `xrpo`) get no bonus and
    are not in the mean, because they are likely under that prompt. lam and kappa are the paper's.
    """

    paper: ClassVar[str] = "XRPO, advantage sharpening"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "P"
    lam: NonNegativeFloat = 2.5
    """Factor of the bonus."""
    kappa: NonNegativeFloat = 0.5
    """Largest bonus as a share of the advantage."""
    correct: float = 0.5
    """A sample is correct if its reward is above this."""

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
