"""Group planners: policies that set the number of samples of a group and decide whether it is trained.

A planner decides about a group when all its samples are terminal and have their rewards. Samples whose reward could
not be computed (censored) do not count. With several planners, the first decision other than Accept holds.

Imports no torch, because it runs in the rollout process.
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
"""Largest number of samples of one group, so that a wrong parameter of a planner does not exhaust the memory."""
GroupLimit = Annotated[int, Field(gt=0, le=MAX_GROUP)]


@dataclass(frozen=True)
class Accept:
    """Decision: the group is sent to the trainer."""


@dataclass(frozen=True)
class Drop:
    """Decision: the group is not trained, and another group is started instead.

    Attributes:
        reason: Name of the metric that counts such decisions.
    """

    reason: str


@dataclass(frozen=True)
class Prefix:
    """Start of a new sample's response: tokens of another sample of its group, then given tokens.

    Attributes:
        index: Index of the other sample in the group.
        at: Number of response tokens copied from it.
        ids: Token ids that follow; they are not trained.
    """

    index: int
    at: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class AddSamples:
    """Decision: samples are added to the group.

    Attributes:
        samples: Number of additional samples.
        prompt_ids: Prompt of the additional samples; None for the group's prompt.
        prefixes: Start of the response of each additional sample; empty if none has a given start.
    """

    samples: int
    prompt_ids: tuple[int, ...] | None = None
    prefixes: tuple[Prefix, ...] = ()


@dataclass(frozen=True)
class Hold:
    """Decision: the group waits until the planner can decide about several groups together (Planner.released)."""


Decision = Accept | Drop | AddSamples | Hold


class Planner(Plugin):
    """Base of planners. By default a group has rollout.group_size samples and is accepted."""

    def size(self, group_size: int) -> int:
        """Return the number of samples that a new group starts with."""
        return group_size

    def limit(self, size: int) -> int:
        """Return the largest number of samples of a group that starts with `size` samples."""
        return size

    def forget(self, group_id: int) -> None:
        """Delete the state of a group that was dropped before a decision."""

    def needs_scores(self, group: SampleGroup) -> bool:
        """Return whether the planner needs `receive_scores` before its decision about the group."""
        return False

    def receive_scores(self, group_id: int, scores: Sequence[float], protect: Sequence[bool]) -> None:
        """Receive scores of the prompt tokens of a group.

        Args:
            group_id: the group.
            scores: disagreement of policy and reference on each prompt token.
            protect: for each prompt token, whether it must not be removed.
        """

    def needs_repairs(self, group: SampleGroup) -> Sequence[int]:
        """Return the indices of the samples whose repaired prefix the planner needs before its decision."""
        return ()

    def receive_repairs(self, group_id: int, prefixes: Sequence[Prefix]) -> None:
        """Receive repaired prefixes of failed samples; additional samples of the group can start with them."""

    def needs_probes(self, group_id: int) -> int:
        """Return the number of responses to the group's prompt that the planner needs from probing engines."""
        return 0

    def receive_probes(self, group_id: int, rewards: Sequence[float]) -> int:
        """Receive the rewards of the probes, and return the number of samples to add to the group.

        `rewards` is empty if the probes failed.
        """
        return 0

    def on_decided(self, group: SampleGroup, *, accepted: bool) -> None:
        """Handle the final decision about a group: whether it is trained."""

    @property
    def counts(self) -> dict[str, float]:
        """Counts for the metrics."""
        return {}

    def needs_guidance(self, group: SampleGroup) -> Sequence[int]:
        """Return the indices of the failed samples from which a judge must derive a hint before the decision."""
        return ()

    def receive_guidance(self, group_id: int, prompt_ids: Sequence[int]) -> None:
        """Receive the token ids of the group's prompt with the judge's hint."""

    def decide(self, group: SampleGroup) -> Decision:
        """Return the decision about a group whose samples are all complete.

        The caller asks again about a held group when it is released, and about any undecided group after a restart.
        """
        return Accept()

    def waiting(self) -> frozenset[int]:
        """Return the ids of held groups."""
        return frozenset()

    def released(self) -> frozenset[int]:
        """Return the ids of held groups that can be decided now."""
        return frozenset()

    def close_round(self) -> None:
        """Release the held groups. The caller uses this when no other group runs or may start."""

    def restart(self) -> None:
        """Forget the held and released groups, about which the caller asks again."""


def decide(planners: Sequence[Planner], group: SampleGroup) -> Decision:
    """Return the first decision other than Accept, or Accept. A released group starts at the planner that held it."""
    start = next((i for i, p in enumerate(planners) if group.group_id in p.released()), 0)
    for planner in planners[start:]:
        if not isinstance(decision := planner.decide(group), Accept):
            return decision
    return Accept()


def start_size(planners: Sequence[Planner], group_size: int) -> int:
    """Return the number of samples of a new group: each planner changes the result of its predecessor."""
    for planner in planners:
        group_size = planner.size(group_size)
    return group_size


def largest_size(planners: Sequence[Planner], group_size: int) -> int:
    """Return the largest possible number of samples of a group."""
    size = start_size(planners, group_size)
    return max([size, *(p.limit(size) for p in planners)])


def rewards_of(group: SampleGroup) -> list[float]:
    """Return the rewards of the samples that have one."""
    return [s.reward for s in group.samples if s.reward is not None]


def equal(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal up to rounding. The trainer's estimators use the same tolerance."""
    largest = max(map(abs, rewards), default=0.0)
    return not rewards or max(rewards) - min(rewards) <= REWARD_TOLERANCE * largest


def success_rate(group: SampleGroup, correct: float = 0.5) -> float:
    """Return the share of samples with a reward above `correct` among those with a reward; 0 if none has one."""
    rewards = rewards_of(group)
    return sum(r > correct for r in rewards) / len(rewards) if rewards else 0.0


class Fixed(Planner):
    """Every group has rollout.group_size samples and is accepted."""

    evidence: ClassVar[str] = "own"
