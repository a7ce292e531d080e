"""SCOPE's planner: failed responses continue after their corrected first wrong step. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, GroupLimit, Planner, Prefix, success_rate
from rlsys.core.types import SampleGroup


class Scope(Planner):
    """Groups with few successes get further samples that start with a corrected failed response.

    A sample starts with a failed response up to its first wrong step, and the correct step in its place.

    `data.process_judge` finds the step and writes the correct one. The tokens before it are the failed response's
    own, with their log-probs; those of the correct step are not trained; the model continues after them, and the
    reward function judges the whole response. The samples are in the group like any other. Our reading of the
    abstract: it names no threshold, and no loss on the inserted step.
    """

    paper: ClassVar[str] = "SCOPE: step-wise correction for on-policy exploration"
    evidence: ClassVar[str] = "A"
    below: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Groups with at most this success rate are repaired."""
    repairs: GroupLimit = 2
    """Failed responses of a group that are repaired, at the most; the first ones."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    _repairs: dict[int, tuple[Prefix, ...]] = PrivateAttr(default_factory=dict)
    _repaired: set[int] = PrivateAttr(default_factory=set)

    def needs(self) -> frozenset[str]:
        return frozenset({"repairs"})

    def limit(self, size: int) -> int:
        return size + self.repairs

    def forget(self, group_id: int) -> None:
        self._repairs.pop(group_id, None)
        self._repaired.discard(group_id)

    def needs_repairs(self, group: SampleGroup) -> Sequence[int]:
        if group.group_id in self._repaired or success_rate(group, self.correct) > self.below:
            return ()
        failed = [s.index for s in group.samples if s.reward is not None and s.reward <= self.correct]
        return failed[: self.repairs]

    def receive_repairs(self, group_id: int, prefixes: Sequence[Prefix]) -> None:
        self._repairs[group_id] = tuple(prefixes)

    def decide(self, group: SampleGroup) -> Decision:
        prefixes = self._repairs.pop(group.group_id, ())
        if group.group_id in self._repaired or not prefixes:
            self._repaired.discard(group.group_id)
            return Accept()
        self._repaired.add(group.group_id)
        return AddSamples(len(prefixes), prefixes=prefixes)

    def state_dict(self) -> dict[str, Any]:
        return {"repaired": sorted(self._repaired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._repaired = set(state["repaired"])
