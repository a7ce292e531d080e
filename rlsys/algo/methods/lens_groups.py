"""LENS's planner: additional responses to a cleaned prompt. Imports no torch: it runs in the rollout process."""

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
    """Return a prompt of n tokens without the ceil(share n) unprotected tokens with the largest scores.

    Args:
        prompt_ids: token ids of the prompt.
        scores: score of each token.
        share: share of the tokens to remove.
        protect: for each token, whether it must not be removed.

    Raises:
        ValueError: the arguments have different lengths.
    """
    if not len(prompt_ids) == len(scores) == len(protect):
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens, but there are {len(scores)} scores and {len(protect)} "
            "protection flags; expected one of each for each token"
        )
    removable = [i for i, is_protected in enumerate(protect) if not is_protected]
    worst = set(sorted(removable, key=lambda i: (-scores[i], i))[: math.ceil(share * len(prompt_ids))])
    return tuple(t for i, t in enumerate(prompt_ids) if i not in worst)


class Lens(Planner):
    """Add samples of a cleaned prompt to hard groups.

    If the success rate of a group is below `below`, the planner removes the prompt tokens with the largest |log
    policy - log reference|, except special tokens, and doubles the number of samples. The selector `lens` replaces
    failures of the original prompt by successes of the cleaned prompt, and the correction `lens` trains these on the
    original prompt. `engine.reference` sets the reference.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    below: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Groups with a success rate below this get samples of a cleaned prompt."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the prompt's tokens to remove (usual: 0.01 to 0.05)."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    _scores: dict[int, tuple[list[float], list[bool]]] = PrivateAttr(default_factory=dict)
    """Group id -> scores of the prompt tokens and protection flags, until the decision."""
    _cleaned_groups: set[int] = PrivateAttr(default_factory=set)
    """Ids of running groups with samples of a cleaned prompt."""

    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_scores"})

    def limit(self, size: int) -> int:
        return 2 * size

    def forget(self, group_id: int) -> None:
        self._scores.pop(group_id, None)
        self._cleaned_groups.discard(group_id)

    def needs_scores(self, group: SampleGroup) -> bool:
        return group.group_id not in self._cleaned_groups and success_rate(group, self.correct) < self.below

    def receive_scores(self, group_id: int, scores: Sequence[float], protect: Sequence[bool]) -> None:
        self._scores[group_id] = (list(scores), list(protect))

    def decide(self, group: SampleGroup) -> Decision:
        scores = self._scores.pop(group.group_id, None)
        if group.group_id in self._cleaned_groups:
            self._cleaned_groups.discard(group.group_id)
            return Accept()
        if scores is None or success_rate(group, self.correct) >= self.below:
            return Accept()
        self._cleaned_groups.add(group.group_id)
        prompt_ids = group.samples[0].prompt_ids
        return AddSamples(len(group.samples), purified(prompt_ids, scores[0], self.share, scores[1]))

    def state_dict(self) -> dict[str, Any]:
        return {"cleaned": sorted(self._cleaned_groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cleaned_groups = set(state["cleaned"])
