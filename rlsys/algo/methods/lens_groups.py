"""LENS in the rollout process: additional responses to purified prompts. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, Planner, success_rate
from rlsys.core.types import SampleGroup


def purified(
    prompt_ids: Sequence[int], scores: Sequence[float], share: float, protect: Sequence[bool]
) -> tuple[int, ...]:
    """Return the prompt without the ceil(share n) unprotected tokens with the largest scores."""
    if not len(prompt_ids) == len(scores) == len(protect):
        raise ValueError(
            f"{len(prompt_ids)} prompt tokens, but {len(scores)} scores and {len(protect)} protection flags; "
            "expected one of each per token"
        )
    free = [i for i, is_protected in enumerate(protect) if not is_protected]
    worst = set(sorted(free, key=lambda i: (-scores[i], i))[: math.ceil(share * len(prompt_ids))])
    return tuple(t for i, t in enumerate(prompt_ids) if i not in worst)


class Lens(Planner):
    """Add samples of a cleaned prompt, without the tokens on which policy and reference disagree most, to hard
    groups.

    If a group's success rate is below `below`, the planner scores each prompt token by |log policy - log reference|,
    deletes the top `share`, and requests as many samples again. The selector `lens` replaces failures by their
    successes, and the correction `lens` trains them on the original prompt. The reference is the server of
    engine.reference; special tokens are protected.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    below: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Success rate below which a prompt is cleaned."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of prompt tokens deleted (1 to 5 %)."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    _scores: dict[int, tuple[list[float], list[bool]]] = PrivateAttr(default_factory=dict)
    _cleaned: set[int] = PrivateAttr(default_factory=set)

    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_scores"})

    def limit(self, size: int) -> int:
        return 2 * size

    def forget(self, group_id: int) -> None:
        self._scores.pop(group_id, None)
        self._cleaned.discard(group_id)

    def needs_scores(self, group: SampleGroup) -> bool:
        return group.group_id not in self._cleaned and success_rate(group, self.correct) < self.below

    def receive_scores(self, group_id: int, scores: Sequence[float], protect: Sequence[bool]) -> None:
        self._scores[group_id] = (list(scores), list(protect))

    def decide(self, group: SampleGroup) -> Decision:
        scored = self._scores.pop(group.group_id, None)
        if group.group_id in self._cleaned:
            self._cleaned.discard(group.group_id)
            return Accept()
        if scored is None or success_rate(group, self.correct) >= self.below:
            return Accept()
        self._cleaned.add(group.group_id)
        prompt_ids = group.samples[0].prompt_ids
        return AddSamples(len(group.samples), purified(prompt_ids, scored[0], self.share, scored[1]))

    def state_dict(self) -> dict[str, Any]:
        return {"cleaned": sorted(self._cleaned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cleaned = set(state["cleaned"])
