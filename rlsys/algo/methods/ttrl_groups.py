"""TTRL in the rollout process: majority votes instead of an answer key, and the size of the vote. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from rlsys.algo.group_rewards import GroupReward, Judge, Response
from rlsys.algo.planners import Multiple, Planner


class Votes(Planner):
    """Groups of `factor` times rollout.group_size samples, which vote; the selector ttrl trains a part of them."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"
    factor: Multiple = 2.0
    """Votes per trained sample (64 votes, 32 trained)."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)


def majority(answers: Sequence[str | None]) -> str | None:
    """Return the most frequent answer, the first one in a tie; None if there is no answer."""
    counts = Counter(a for a in answers if a is not None)
    return max(counts, key=lambda a: counts[a]) if counts else None


class Ttrl(GroupReward):
    """1 for the majority answer of the group, otherwise 0: a reward without an answer key."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        winner = majority([r.answer for r in responses])
        return [float(r.answer is not None and r.answer == winner) for r in responses]
