"""Group planners: number of samples of a group, and whether it is accepted. For the rollout process: no torch.

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
"""Samples of one group: far beyond any use, so that a mistake does not exhaust the memory."""
GroupLimit = Annotated[int, Field(gt=0, le=MAX_GROUP)]


@dataclass(frozen=True)
class Accept:
    """The group goes to the trainer."""


@dataclass(frozen=True)
class Drop:
    """The group is filtered, for a reason that is counted; another one is started in its place."""

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
    """The group gets `samples` more.

    They use `prompt_ids` instead of the group's prompt if it is given, or each one of the `prefixes`.
    """

    samples: int
    prompt_ids: tuple[int, ...] | None = None
    prefixes: tuple[Prefix, ...] = ()


@dataclass(frozen=True)
class Hold:
    """The group waits for others, to be decided together: see Planner.released."""


Decision = Accept | Drop | AddSamples | Hold


class Planner(Plugin):
    """Size of a group, and the decision about it."""

    def size(self, group_size: int) -> int:
        """Return the number of samples that a new group starts with."""
        return group_size

    def limit(self, size: int) -> int:
        """Return the largest number of samples of a group that starts with `size`."""
        return size

    def forget(self, group_id: int) -> None:
        """Forget a group that was dropped before it could be decided."""

    def needs_scores(self, group: SampleGroup) -> bool:
        """Whether it needs the scores of the group's prompt before it decides."""
        return False

    def receive_scores(self, group_id: int, scores: Sequence[float], protect: Sequence[bool]) -> None:
        """Receive the disagreement of policy and reference on each prompt token, and the protected tokens."""

    def needs_repairs(self, group: SampleGroup) -> Sequence[int]:
        """Return the indices of samples whose first wrong step it needs before it decides."""
        return ()

    def receive_repairs(self, group_id: int, prefixes: Sequence[Prefix]) -> None:
        """Receive possible starts of further samples of a group."""

    def needs_probes(self, group_id: int) -> int:
        """Return the number of probes of a group's prompt that it needs as soon as the group starts."""
        return 0

    def receive_probes(self, group_id: int, rewards: Sequence[float]) -> int:
        """Receive the rewards of probes; empty if there are none.

        Return the number of samples that are added immediately.
        """
        return 0

    def on_decided(self, group: SampleGroup, *, accepted: bool) -> None:
        """React to the final decision about a group. `accepted`: it goes to the trainer, else it is filtered."""

    @property
    def counts(self) -> dict[str, float]:
        """Counts for the metrics."""
        return {}

    def needs_guidance(self, group: SampleGroup) -> Sequence[int]:
        """Return the indices of failed samples from which a judge must make a hint before it decides."""
        return ()

    def receive_guidance(self, group_id: int, prompt_ids: Sequence[int]) -> None:
        """Receive the group's prompt with the hint."""

    def decide(self, group: SampleGroup) -> Decision:
        """Decide about a group whose samples are all complete.

        A held group is decided again once it is released; after a restart at any time.
        """
        return Accept()

    def waiting(self) -> frozenset[int]:
        """Return the ids of held groups."""
        return frozenset()

    def released(self) -> frozenset[int]:
        """Return the ids of groups that were held and can be decided now."""
        return frozenset()

    def close_round(self) -> None:
        """Decide the held groups without further ones, because nothing else runs or may start."""

    def restart(self) -> None:
        """Reset held and released groups: they will be decided again from the start."""


def decide(planners: Sequence[Planner], group: SampleGroup) -> Decision:
    """Return the first decision that is not Accept. A held group continues with the planner that held it."""
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
    """Whether rewards are equal up to rounding, as for the trainer's estimators (rlsys.algo.batch)."""
    largest = max(map(abs, rewards), default=0.0)
    return not rewards or max(rewards) - min(rewards) <= REWARD_TOLERANCE * largest


def success_rate(group: SampleGroup, correct: float = 0.5) -> float:
    """Return the share of rewarded samples with a reward above `correct`; 0 if none is rewarded."""
    rewards = rewards_of(group)
    return sum(r > correct for r in rewards) / len(rewards) if rewards else 0.0


class Fixed(Planner):
    """Every group has rollout.group_size samples and is accepted."""

    evidence: ClassVar[str] = "own"
