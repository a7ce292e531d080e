"""GRPO-RoC (rStar2-Agent, section 3.2) in the rollout process: oversampled groups. No torch."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algo.planners import Multiple, Planner


class Oversample(Planner):
    """Oversampled groups, from which the selector grpo_roc chooses: rollout.group_size times `factor`."""

    paper: ClassVar[str] = "rStar2-Agent (GRPO-RoC), section 3.2"
    evidence: ClassVar[str] = "R"
    factor: Multiple = 2.0
    """Multiple of rollout.group_size."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)
