"""TTRL in the rollout process: votes in the place of an answer key, and the size of the vote. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from rlsys.algo.group_rewards import GroupReward, Judge, Response
from rlsys.algo.planners import Multiple, Planner


class Votes(Planner):
    """Test-time RL votes with more samples than it trains: `factor` times rollout.group_size."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"
    factor: Multiple = 2.0
    """Votes per trained sample (64 votes, 32 trained)."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)


def majority(answers: Sequence[str | None]) -> str | None:
    """Return the most frequent answer; of several, the first one. None without any answer."""
    counts = Counter(a for a in answers if a is not None)
    return max(counts, key=lambda a: counts[a]) if counts else None


class Ttrl(GroupReward):
    """1 for agreeing with the majority of the group's answers, 0 else: learning without a key."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    async def __call__(
        self, prompt: str, responses: Sequence[Response], judge: Judge | None
    ) -> list[float | None]:
        winner = majority([r.answer for r in responses])
        return [float(r.answer is not None and r.answer == winner) for r in responses]
