"""DAPO's dynamic sampling. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

from statistics import stdev
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, Decision, Drop, Planner, PositiveInt, equal, rewards_of
from rlsys.core.types import SampleGroup


class Dapo(Planner):
    """Dynamic sampling: drop groups whose rewards are equal, because they have no gradient, and start other groups.

    Rewards are those before shaping. After `drops` consecutive drops the next group is accepted, so that a step
    always ends.
    """

    paper: ClassVar[str] = "DAPO, section 3.2"
    evidence: ClassVar[str] = "R"
    spread: Annotated[float, Field(ge=0)] = 0.0
    """Largest standard deviation of the rewards of a dropped group."""
    drops: PositiveInt = 160
    """Number of consecutive drops after which any group is accepted."""
    _consecutive_drops: int = PrivateAttr(default=0)

    def decide(self, group: SampleGroup) -> Decision:
        rewards = rewards_of(group)
        if (not equal(rewards) and stdev(rewards) > self.spread) or self._consecutive_drops >= self.drops:
            self._consecutive_drops = 0
            return Accept()
        self._consecutive_drops += 1
        return Drop("equal rewards")

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._consecutive_drops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._consecutive_drops = int(state["row"])
