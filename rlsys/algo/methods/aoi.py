"""A planner that turns failures into signal: AOI's. For the rollout process: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, GroupLimit, Planner, PositiveInt, success_rate
from rlsys.core.types import SampleGroup


class Aoi(Planner):
    """Groups with few successes get further samples whose prompt has a judge's guidance, mined from failed responses.

    `data.judge` reads the problem and some of the failed responses, and writes the mistake and a hint.
    The further samples are drawn from the problem with this guidance behind it, and trained on the plain prompt, so
    that the policy learns to do without. A judge that says nothing in time leaves the group as it is. Our reading of
    the abstract: one policy, a guidance for each group and no pool of them.
    """

    paper: ClassVar[str] = "AOI: turning failed trajectories into training signals (arXiv 2603.03378)"
    evidence: ClassVar[str] = "A"
    below: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Groups with at most this success rate are mined."""
    samples: GroupLimit = 4
    """Further samples, with the guidance."""
    failed_responses: PositiveInt = 2
    """Failed responses that the judge reads; the first ones."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    _guided: dict[int, tuple[int, ...]] = PrivateAttr(default_factory=dict)
    _mined: set[int] = PrivateAttr(default_factory=set)

    def needs(self) -> frozenset[str]:
        return frozenset({"guidance"})

    def limit(self, size: int) -> int:
        return size + self.samples

    def forget(self, group_id: int) -> None:
        self._guided.pop(group_id, None)
        self._mined.discard(group_id)

    def needs_guidance(self, group: SampleGroup) -> Sequence[int]:
        if group.group_id in self._mined or success_rate(group, self.correct) > self.below:
            return ()
        failed = [s.index for s in group.samples if s.reward is not None and s.reward <= self.correct]
        return failed[: self.failed_responses]

    def receive_guidance(self, group_id: int, prompt_ids: Sequence[int]) -> None:
        self._guided[group_id] = tuple(prompt_ids)

    def decide(self, group: SampleGroup) -> Decision:
        prompt_ids = self._guided.pop(group.group_id, None)
        if group.group_id in self._mined or prompt_ids is None:
            self._mined.discard(group.group_id)
            return Accept()
        self._mined.add(group.group_id)
        return AddSamples(self.samples, prompt_ids)

    def state_dict(self) -> dict[str, Any]:
        return {"mined": sorted(self._mined)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mined = set(state["mined"])
