"""TTRL's group reward and planner: majority votes instead of reference answers, and the number of votes.

Imports no torch, because it runs in the rollout process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from rlsys.algo.group_rewards import GroupReward, Judge, Response
from rlsys.algo.planners import Multiple, Planner


class Votes(Planner):
    """Multiply the number of samples of a group by `factor`. All samples vote; the selector `ttrl` trains a part."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"
    factor: Multiple = 2.0
    """Number of votes per trained sample (paper: 64 votes, 32 trained samples)."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)


def majority(answers: Sequence[str | None]) -> str | None:
    """Return the most frequent answer, in a tie the earliest one; None if there is no answer."""
    counts = Counter(a for a in answers if a is not None)
    return max(counts, key=lambda a: counts[a]) if counts else None


class Ttrl(GroupReward):
    """Reward of 1 for the majority answer of the group and 0 for others, without a reference answer."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        winner = majority([r.answer for r in responses])
        return [float(r.answer is not None and r.answer == winner) for r in responses]
