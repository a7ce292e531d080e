"""MC-GRPO's planner: odd group sizes. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algo.planners import Planner


class OneMore(Planner):
    """Make the number of samples of a group odd, as the median requires.

    A group has rollout.group_size + 1 samples, or rollout.group_size + 2 if that number is even.
    """

    paper: ClassVar[str] = "MC-GRPO: median-centred GRPO"
    evidence: ClassVar[str] = "R"

    def size(self, group_size: int) -> int:
        return group_size + 1 + group_size % 2
