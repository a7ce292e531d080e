"""GRPO-RoC (rStar2-Agent, section 3.2) in the trainer: selection of the trained samples of an oversampled group."""

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
    """Resample on correct: keep half of an oversampled group, random failures but only the cleanest successes.

    The selection keeps the group's proportion of successes, with at least `least` successes and failures if
    available. Successes are ranked by a penalty: the share of failed tool calls (0.5 without a call) plus
    min((answers - 1) / turns, 1), or 1 without an answer; without tools, the length. Baselines are those of the kept
    samples. Use `planners: [grpo_roc]` to oversample groups.
    """

    paper: ClassVar[str] = "rStar2-Agent (GRPO-RoC), section 3.2"
    evidence: ClassVar[str] = "R"
    before_advantages: ClassVar[bool] = True
    keep: Fraction = 0.5
    """Share of each group that is trained."""
    least: Annotated[int, Field(ge=0)] = 2
    """Minimum number of kept successes and of kept failures, if the group has them."""
    penalty: Literal["tools", "length"] = "tools"
    """Quantity that ranks the successes: failed tool calls, or the length."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    seed: Seed = 0
    """Seed of the draws among failures, and among successes of the same penalty."""

    def needs(self) -> frozenset[str]:
        return frozenset({"tool_penalty"}) if self.penalty == "tools" else frozenset()

    def size_of(self, group: int) -> int:
        return max(1, round(self.keep * group))

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        penalty = (
            samples.lengths.double() if self.penalty == "length" else samples.column("tool_penalty").double()
        )
        success = (samples.reward > self.correct).cpu()
        draw = sample_draws(samples, self.seed)
        rank = torch.where(success, penalty.cpu(), draw)
        out = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            successes, failures = members[success[members]], members[~success[members]]
            total = self.size_of(len(members))
            good = self._success_count(len(successes), len(failures), total)
            for candidates, count in ((successes, good), (failures, total - good)):
                out[candidates[argsort_with_draws(rank[candidates], draw[candidates])[:count]]] = 1.0
        return out.to(samples.rewards.device)

    def _success_count(self, successes: int, failures: int, total: int) -> int:
        """Return the number of successes among `total` selected samples."""
        target = round(total * successes / (successes + failures))
        floor, ceiling = min(self.least, successes), total - min(self.least, failures)
        target = max(min(target, ceiling), floor)
        return min(max(target, total - failures), successes)
