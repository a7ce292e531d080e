"""SCOPE's planner: failed responses continue after their corrected first wrong step. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, GroupLimit, Planner, Prefix, success_rate
from rlsys.core.types import SampleGroup


class Scope(Planner):
    """Add samples to groups with few successes that start with a corrected failed response.

    Such a sample starts with a failed response up to its first wrong step, followed by the correct step, from which
    the model continues. `data.process_judge` finds the wrong step and writes the correct one. The tokens before it
    keep the log-probs of the failed response; those of the correct step are not trained. The reward function scores
    the whole response, and the sample is in the group like any other. This is a reading of the abstract, which states
    neither a threshold nor a loss on the inserted step.
    """

    paper: ClassVar[str] = "SCOPE: step-wise correction for on-policy exploration"
    evidence: ClassVar[str] = "A"
    below: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Groups with at most this success rate are repaired."""
    repairs: GroupLimit = 2
    """Maximum number of repaired responses per group; the first failed ones are chosen."""
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
