"""BroRL's planner: more samples per prompt. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algo.planners import Multiple, Planner


class Broad(Planner):
    """Multiply the number of samples per prompt by `factor`.

    Divide rollout.groups_per_step by the same factor to keep the number of samples per step.
    """

    paper: ClassVar[str] = "BroRL: broad scaling of rollouts"
    evidence: ClassVar[str] = "P"
    factor: Multiple = 4.0
    """Number of samples of a group as a multiple of rollout.group_size."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)
