"""GRPO-RoC's selection of the trained samples of an oversampled group (rStar2-Agent, section 3.2).

The planner that oversamples groups is in grpo_roc_groups.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.draws import argsort_with_draws, sample_draws
from rlsys.algo.segments import groups_of
from rlsys.algo.selectors import Seed, Selector
from rlsys.config.section import Fraction


class GrpoRoc(Selector):
    """Resample on correct: keep a share of an oversampled group, random failures but only the best successes.

    The selection has the group's proportion of successes, but at least `least` successes and `least` failures if the
    group has them. The best successes are those with the smallest penalty:
    - `penalty: tools`: the share of failed tool calls (0.5 without a call), plus min((answers - 1) / turns, 1), or
      plus 1 without an answer;
    - `penalty: length`: the number of tokens.

    Baselines are those of the kept samples. `planners: [grpo_roc]` oversamples groups.
    """

    paper: ClassVar[str] = "rStar2-Agent (GRPO-RoC), section 3.2"
    evidence: ClassVar[str] = "R"
    before_advantages: ClassVar[bool] = True
    keep: Fraction = 0.5
    """Share of each group that is trained."""
    least: Annotated[int, Field(ge=0)] = 2
    """Smallest number of kept successes and of kept failures, if the group has them."""
    penalty: Literal["tools", "length"] = "tools"
    """Penalty that ranks the successes: defects in the use of tools, or the length."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    seed: Seed = 0
    """Seed of the random choice among failures, and among successes with the same penalty."""

    def needs(self) -> frozenset[str]:
        return frozenset({"tool_penalty"}) if self.penalty == "tools" else frozenset()

    def size_of(self, group: int) -> int:
        return max(1, round(self.keep * group))

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        penalty = samples.lengths if self.penalty == "length" else samples.column("tool_penalty")
        success = (samples.reward > self.correct).cpu()
        draw = sample_draws(samples, self.seed)
        rank = torch.where(success, penalty.double().cpu(), draw)
        weight = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            successes, failures = members[success[members]], members[~success[members]]
            total = self.size_of(len(members))
            success_count = self._success_count(len(successes), len(failures), total)
            for candidates, count in ((successes, success_count), (failures, total - success_count)):
                order = argsort_with_draws(rank[candidates], draw[candidates])
                weight[candidates[order[:count]]] = 1.0
        return weight.to(samples.rewards.device)

    def _success_count(self, successes: int, failures: int, total: int) -> int:
        """Return the number of successes among the selected samples of a group.

        Args:
            successes: number of successes of the group.
            failures: number of failures of the group.
            total: number of selected samples.
        """
        proportional = round(total * successes / (successes + failures))
        min_successes = min(self.least, successes)
        max_successes = total - min(self.least, failures)
        bounded = max(min(proportional, max_successes), min_successes)
        return min(max(bounded, total - failures), successes)
