"""How many samples a group gets, and whether it is kept. For the rollout process: no torch.

A planner sees a group when all its samples are terminal and rewarded. Samples without a reward (censored) do not
count. Several planners in a row: the first that does not accept decides.
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
LARGEST_GROUP = 65536
"""Samples of one group: far beyond any use, so that a slip does not fill the memory."""
GroupLimit = Annotated[int, Field(gt=0, le=LARGEST_GROUP)]


@dataclass(frozen=True)
class Accept:
    """The group goes to the trainer."""


@dataclass(frozen=True)
class Drop:
    """The group is filtered, for a reason that is counted; another one is started in its place."""

    reason: str


@dataclass(frozen=True)
class Prefix:
    """A new sample begins with the first `at` response tokens of the sample at `place` of its group, and goes on with
    `ids`, which are not trained."""

    place: int
    at: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class More:
    """The group gets `samples` more, from `prompt_ids` instead of its own prompt when given; or each with one of the
    `prefixes`."""

    samples: int
    prompt_ids: tuple[int, ...] | None = None
    prefixes: tuple[Prefix, ...] = ()


@dataclass(frozen=True)
class Hold:
    """The group waits for others, to be decided together: see Planner.released."""


Decision = Accept | Drop | More | Hold


class Planner(Plugin):
    """Size of a group, and what becomes of it."""

    def size(self, group_size: int) -> int:
        """Samples that a new group starts with."""
        return group_size

    def limit(self, size: int) -> int:
        """Most samples that a group which starts with `size` can ever have."""
        return size

    def forget(self, group_id: int) -> None:
        """The group was dropped before it could be decided."""

    def wants_scores(self, group: SampleGroup) -> bool:
        """Whether it is to hear of the group's prompt before it decides."""
        return False

    def hear_scores(self, group_id: int, scores: Sequence[float], protect: Sequence[bool]) -> None:
        """How far policy and reference disagree on each prompt token of a group; which ones must stay."""

    def wants_repairs(self, group: SampleGroup) -> Sequence[int]:
        """Places of samples of which it is to hear, before it decides, where they go wrong first."""
        return ()

    def hear_repairs(self, group_id: int, found: Sequence[Prefix]) -> None:
        """What further samples of a group may begin with."""

    def wants_probes(self, group_id: int) -> int:
        """How many answers to a group's prompt it wants to hear the rewards of, as soon as the group begins."""
        return 0

    def hear_probes(self, group_id: int, rewards: Sequence[float]) -> int:
        """They are known; none when nobody could give any. Further samples that the group gets at once."""
        return 0

    def closed(self, group: SampleGroup, *, kept: bool) -> None:
        """The group is decided for good. `kept`: it goes to the trainer, else it is filtered."""

    @property
    def counts(self) -> dict[str, float]:
        """For the metrics."""
        return {}

    def wants_guidance(self, group: SampleGroup) -> Sequence[int]:
        """Places of failed samples from which a judge is to make a hint, before it decides."""
        return ()

    def hear_guidance(self, group_id: int, prompt_ids: Sequence[int]) -> None:
        """The group's prompt with that hint."""

    def decide(self, group: SampleGroup) -> Decision:
        """What happens to a group whose samples are all done. One that is held is asked for again, once it is
        released; after a restart at any time."""
        return Accept()

    def waiting(self) -> frozenset[int]:
        """Ids of groups that it holds."""
        return frozenset()

    def released(self) -> frozenset[int]:
        """Ids of groups that it held, and can decide now."""
        return frozenset()

    def close_round(self) -> None:
        """Nothing else runs or may start: decide what is held, without those that it was held for."""

    def restart(self) -> None:
        """What it holds, or has released, will be asked for again as if for the first time."""


def decide(planners: Sequence[Planner], group: SampleGroup) -> Decision:
    """The first decision that is not Accept. A group that was held goes on where it was held."""
    start = next((i for i, p in enumerate(planners) if group.group_id in p.released()), 0)
    for planner in planners[start:]:
        if not isinstance(decision := planner.decide(group), Accept):
            return decision
    return Accept()


def start_size(planners: Sequence[Planner], group_size: int) -> int:
    """Samples of a new group, after all planners in turn."""
    for planner in planners:
        group_size = planner.size(group_size)
    return group_size


def largest_size(planners: Sequence[Planner], group_size: int) -> int:
    """Most samples that a group can ever have."""
    size = start_size(planners, group_size)
    return max([size, *(p.limit(size) for p in planners)])


def rewards_of(group: SampleGroup) -> list[float]:
    return [s.reward for s in group.samples if s.reward is not None]


def equal(rewards: Sequence[float]) -> bool:
    """Whether they differ by rounding at the most, as the trainer's estimators have it (rlsys.algo.batch)."""
    largest = max(map(abs, rewards), default=0.0)
    return not rewards or max(rewards) - min(rewards) <= REWARD_TOLERANCE * largest


def success_rate(group: SampleGroup, correct: float = 0.5) -> float:
    """Share of rewarded samples with a reward above `correct`; 0 when none is rewarded."""
    rewards = rewards_of(group)
    return sum(r > correct for r in rewards) / len(rewards) if rewards else 0.0


class Fixed(Planner):
    """Every group has rollout.group_size samples and is accepted."""

    evidence: ClassVar[str] = "own"
