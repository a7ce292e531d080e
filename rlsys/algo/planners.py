"""Group planners: policies for the number of samples of a group and its acceptance.

Imports no torch, because it runs in the rollout process.

A planner decides about a group when all its samples are terminal and rewarded. Samples without a reward (censored) do
not count. With several planners, the first that does not accept decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.plugin import REWARD_TOLERANCE, Plugin
from rlsys.core.types import SampleGroup

PositiveInt = Annotated[int, Field(gt=0)]
Multiple = Annotated[float, Field(ge=1, le=1024)]
MAX_GROUP = 65536
"""Maximum number of samples of one group, so that a misconfigured planner does not exhaust the memory."""
GroupLimit = Annotated[int, Field(gt=0, le=MAX_GROUP)]


@dataclass(frozen=True)
class Accept:
    """Decision: the group is sent to the trainer."""


@dataclass(frozen=True)
class Drop:
    """Decision: the group is filtered, and another one is started. A metric counts each `reason`."""

    reason: str


@dataclass(frozen=True)
class Prefix:
    """Start of a new sample: the first `at` response tokens of sample `index` of its group, then `ids`.

    The tokens of `ids` are not trained.
    """

    index: int
    at: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class AddSamples:
    """Decision: the group gets `samples` additional samples.

    Attributes:
        samples: their number.
        prompt_ids: their prompt; None for the group's.
        prefixes: the start of each, if any.
    """

    samples: int
    prompt_ids: tuple[int, ...] | None = None
    prefixes: tuple[Prefix, ...] = ()


@dataclass(frozen=True)
class Hold:
    """Decision: the group waits until the planner decides it together with others (Planner.released)."""


Decision = Accept | Drop | AddSamples | Hold


class Planner(Plugin):
    """Base of planners. The defaults accept every group with rollout.group_size samples."""

    def size(self, group_size: int) -> int:
        """Return the number of samples that a new group starts with."""
        return group_size

    def limit(self, size: int) -> int:
        """Return the largest number of samples of a group that starts with `size`."""
        return size

    def forget(self, group_id: int) -> None:
        """Delete the state of a group that was dropped before a decision."""

    def needs_scores(self, group: SampleGroup) -> bool:
        """Return whether it needs the scores of the group's prompt before its decision."""
        return False

    def receive_scores(self, group_id: int, scores: Sequence[float], protect: Sequence[bool]) -> None:
        """Receive the disagreement of policy and reference on each prompt token, and which tokens are protected."""

    def needs_repairs(self, group: SampleGroup) -> Sequence[int]:
        """Return the indices of the samples whose first wrong step it needs before its decision."""
        return ()

    def receive_repairs(self, group_id: int, prefixes: Sequence[Prefix]) -> None:
        """Receive repaired prefixes, with which additional samples of a group can start."""

    def needs_probes(self, group_id: int) -> int:
        """Return the number of probes of the prompt that it needs when a group starts."""
        return 0

    def receive_probes(self, group_id: int, rewards: Sequence[float]) -> int:
        """Receive the rewards of probes, empty if they failed, and return the number of samples to add at once."""
        return 0

    def on_decided(self, group: SampleGroup, *, accepted: bool) -> None:
        """Handle the final decision about a group. `accepted`: it is trained, otherwise filtered."""

    @property
    def counts(self) -> dict[str, float]:
        """Counts for the metrics."""
        return {}

    def needs_guidance(self, group: SampleGroup) -> Sequence[int]:
        """Return the indices of the failed samples from which a judge derives a hint before the decision."""
        return ()

    def receive_guidance(self, group_id: int, prompt_ids: Sequence[int]) -> None:
        """Receive the group's prompt with the hint."""

    def decide(self, group: SampleGroup) -> Decision:
        """Return the decision about a group whose samples are all complete.

        It is called again for a held group once the group is released, and at any time after a restart.
        """
        return Accept()

    def waiting(self) -> frozenset[int]:
        """Return the ids of held groups."""
        return frozenset()

    def released(self) -> frozenset[int]:
        """Return the ids of held groups that can be decided now."""
        return frozenset()

    def close_round(self) -> None:
        """Release the held groups, because no other group runs or may start."""

    def restart(self) -> None:
        """Clear held and released groups, which will be decided again."""


def decide(planners: Sequence[Planner], group: SampleGroup) -> Decision:
    """Return the first decision other than Accept. A released group continues with the planner that held it."""
    start = next((i for i, p in enumerate(planners) if group.group_id in p.released()), 0)
    for planner in planners[start:]:
        if not isinstance(decision := planner.decide(group), Accept):
            return decision
    return Accept()


def start_size(planners: Sequence[Planner], group_size: int) -> int:
    """Return the number of samples of a new group, after all planners in turn."""
    for planner in planners:
        group_size = planner.size(group_size)
    return group_size


def largest_size(planners: Sequence[Planner], group_size: int) -> int:
    """Return the largest possible number of samples of a group."""
    size = start_size(planners, group_size)
    return max([size, *(p.limit(size) for p in planners)])


def rewards_of(group: SampleGroup) -> list[float]:
    return [s.reward for s in group.samples if s.reward is not None]


def equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards are equal up to rounding, as in the trainer's estimators (rlsys.algo.batch)."""
    largest = max(map(abs, rewards), default=0.0)
    return not rewards or max(rewards) - min(rewards) <= REWARD_TOLERANCE * largest


def success_rate(group: SampleGroup, correct: float = 0.5) -> float:
    """Return the share of rewarded samples with a reward above `correct`; 0 if none is rewarded."""
    rewards = rewards_of(group)
    return sum(r > correct for r in rewards) / len(rewards) if rewards else 0.0


class Fixed(Planner):
    """Every group has rollout.group_size samples and is accepted."""

    evidence: ClassVar[str] = "own"
