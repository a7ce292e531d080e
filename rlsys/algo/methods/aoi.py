"""AOI's planner: additional samples with guidance from failed responses.

Imports no torch, because it runs in the rollout process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, GroupLimit, Planner, PositiveInt, success_rate
from rlsys.core.types import SampleGroup


class Aoi(Planner):
    """Add samples to groups with few successes; their prompt contains guidance that a judge derives from failures.

    `data.judge` reads the problem and some of the failed responses, and writes down the error and a hint. The
    additional samples are generated from the problem with this guidance, and trained on the problem alone, so that
    the policy learns to solve it without guidance. If the judge does not respond in time, the group gets no
    additional samples. This is a reading of the abstract: one policy, and one guidance per group instead of a pool.
    """

    paper: ClassVar[str] = "AOI: turning failed trajectories into training signals (arXiv 2603.03378)"
    evidence: ClassVar[str] = "A"
    below: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest success rate of a group that gets guidance."""
    samples: GroupLimit = 4
    """Number of additional samples."""
    failed_responses: PositiveInt = 2
    """Number of failed responses that the judge reads."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    _guided_prompts: dict[int, tuple[int, ...]] = PrivateAttr(default_factory=dict)
    """Group id -> prompt with guidance, for groups without a decision since they got it."""
    _extended_groups: set[int] = PrivateAttr(default_factory=set)
    """Ids of running groups that got additional samples."""

    def needs(self) -> frozenset[str]:
        return frozenset({"guidance"})

    def limit(self, size: int) -> int:
        return size + self.samples

    def forget(self, group_id: int) -> None:
        self._guided_prompts.pop(group_id, None)
        self._extended_groups.discard(group_id)

    def needs_guidance(self, group: SampleGroup) -> Sequence[int]:
        if group.group_id in self._extended_groups or success_rate(group, self.correct) > self.below:
            return ()
        failed = [s.index for s in group.samples if s.reward is not None and s.reward <= self.correct]
        return failed[: self.failed_responses]

    def receive_guidance(self, group_id: int, prompt_ids: Sequence[int]) -> None:
        self._guided_prompts[group_id] = tuple(prompt_ids)

    def decide(self, group: SampleGroup) -> Decision:
        prompt_ids = self._guided_prompts.pop(group.group_id, None)
        if group.group_id in self._extended_groups or prompt_ids is None:
            self._extended_groups.discard(group.group_id)
            return Accept()
        self._extended_groups.add(group.group_id)
        return AddSamples(self.samples, prompt_ids)

    def state_dict(self) -> dict[str, Any]:
        return {"mined": sorted(self._extended_groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._extended_groups = set(state["mined"])
