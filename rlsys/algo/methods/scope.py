"""SCOPE's planner: additional samples that continue failed responses after a corrected step.

Imports no torch, because it runs in the rollout process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, GroupLimit, Planner, Prefix, success_rate
from rlsys.core.types import SampleGroup


class Scope(Planner):
    """Add samples to groups with few successes; they continue failed responses after a corrected step.

    The response of an additional sample starts with a failed response up to its first wrong step, followed by a
    correct step. The model generates the rest. `data.process_judge` finds the wrong step and writes the correct one.
    The tokens before the correct step have the log-probs of the failed response; the tokens of the correct step are
    not trained. The reward function scores the whole response, and the sample is trained like any other of its group.
    This is a reading of the abstract, which states neither a threshold nor a loss on the inserted step.
    """

    paper: ClassVar[str] = "SCOPE: step-wise correction for on-policy exploration"
    evidence: ClassVar[str] = "A"
    below: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest success rate of a group that gets additional samples."""
    repairs: GroupLimit = 2
    """Largest number of additional samples of a group; they continue its first failed responses."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    _prefixes: dict[int, tuple[Prefix, ...]] = PrivateAttr(default_factory=dict)
    """Group id -> repaired prefixes, until the decision."""
    _repaired_groups: set[int] = PrivateAttr(default_factory=set)
    """Ids of running groups that got additional samples."""

    def needs(self) -> frozenset[str]:
        return frozenset({"repairs"})

    def limit(self, size: int) -> int:
        return size + self.repairs

    def forget(self, group_id: int) -> None:
        self._prefixes.pop(group_id, None)
        self._repaired_groups.discard(group_id)

    def needs_repairs(self, group: SampleGroup) -> Sequence[int]:
        if group.group_id in self._repaired_groups or success_rate(group, self.correct) > self.below:
            return ()
        failed = [s.index for s in group.samples if s.reward is not None and s.reward <= self.correct]
        return failed[: self.repairs]

    def receive_repairs(self, group_id: int, prefixes: Sequence[Prefix]) -> None:
        self._prefixes[group_id] = tuple(prefixes)

    def decide(self, group: SampleGroup) -> Decision:
        prefixes = self._prefixes.pop(group.group_id, ())
        if group.group_id in self._repaired_groups or not prefixes:
            self._repaired_groups.discard(group.group_id)
            return Accept()
        self._repaired_groups.add(group.group_id)
        return AddSamples(len(prefixes), prefixes=prefixes)

    def state_dict(self) -> dict[str, Any]:
        return {"repaired": sorted(self._repaired_groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._repaired_groups = set(state["repaired"])
