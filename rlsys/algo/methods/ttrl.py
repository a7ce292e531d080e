"""TTRL's selector: the trained part of the samples that voted. The vote and the planner are in ttrl_groups.py."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.draws import sample_draws
from rlsys.algo.segments import groups_of
from rlsys.algo.selectors import Seed, Selector
from rlsys.config.section import Fraction


class Thin(Selector):
    """Train a random share of each group's samples, all of which took part in the vote."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"
    before_advantages: ClassVar[bool] = True
    keep: Fraction = 0.5
    """Share of each group that is trained."""
    seed: Seed = 0
    """Seed of the random choice."""

    def size_of(self, group: int) -> int:
        return max(1, round(self.keep * group))

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        draw = sample_draws(samples, self.seed)
        weight = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            weight[members[torch.argsort(draw[members])[: self.size_of(len(members))]]] = 1.0
        return weight.to(samples.rewards.device)
