"""MC-GRPO in the rollout process: one more response than is trained. No torch."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algo.planners import Planner


class OneMore(Planner):
    """Groups of rollout.group_size + 1 samples, or + 2 if that is even: the median needs an odd group."""

    paper: ClassVar[str] = "MC-GRPO: median-centred GRPO"
    evidence: ClassVar[str] = "R"

    def size(self, group_size: int) -> int:
        return group_size + 1 + group_size % 2
