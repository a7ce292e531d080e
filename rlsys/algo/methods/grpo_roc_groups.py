"""GRPO-RoC's planner: oversampled groups. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algo.planners import Multiple, Planner


class Oversample(Planner):
    """Multiply the number of samples of a group by `factor`; the selector `grpo_roc` trains a part of them."""

    paper: ClassVar[str] = "rStar2-Agent (GRPO-RoC), section 3.2"
    evidence: ClassVar[str] = "R"
    factor: Multiple = 2.0
    """Number of samples of a group as a multiple of rollout.group_size."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)
