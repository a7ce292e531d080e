"""DAPO, section 3.2: dynamic sampling. No torch."""

from __future__ import annotations

from statistics import stdev
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, Decision, Drop, Planner, PositiveInt, equal, rewards_of
from rlsys.core.types import SampleGroup


class Dapo(Planner):
    """Dynamic sampling: drop a group of equal rewards, which has no gradient, and start another.

    The rewards are those before shaping. After `drops` consecutive drops the next group is accepted, so that a step
    always ends.
    """

    paper: ClassVar[str] = "DAPO, section 3.2"
    evidence: ClassVar[str] = "R"
    spread: Annotated[float, Field(ge=0)] = 0.0
    """A group is kept if the standard deviation of its rewards is above this."""
    drops: PositiveInt = 160
    """Number of consecutive drops after which any group is accepted."""
    _row: int = PrivateAttr(default=0)

    def decide(self, group: SampleGroup) -> Decision:
        rewards = rewards_of(group)
        if (not equal(rewards) and stdev(rewards) > self.spread) or self._row >= self.drops:
            self._row = 0
            return Accept()
        self._row += 1
        return Drop("equal rewards")

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = int(state["row"])
