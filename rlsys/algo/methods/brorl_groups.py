"""BroRL in the rollout process: broad scaling of rollouts. No torch."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algo.planners import Multiple, Planner


class Broad(Planner):
    """Many samples per prompt: rollout.group_size times `factor`. Reduce rollout.groups_per_step to keep the cost."""

    paper: ClassVar[str] = "BroRL: broad scaling of rollouts"
    evidence: ClassVar[str] = "P"
    factor: Multiple = 4.0
    """Multiple of rollout.group_size."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)
