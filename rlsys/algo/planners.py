"""How many samples a group gets, and whether it is kept. For the rollout process: no torch.

A planner sees a group when all its samples are terminal and rewarded. Samples without a reward (censored) do not
count. Several planners in a row: the first that does not accept decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from rlsys.algo.plugin import Plugin
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


def success_rate(group: SampleGroup, correct: float = 0.5) -> float:
    """Share of rewarded samples with a reward above `correct`; 0 when none is rewarded."""
    rewards = rewards_of(group)
    return sum(r > correct for r in rewards) / len(rewards) if rewards else 0.0


class Fixed(Planner):
    """Every group has rollout.group_size samples and is accepted."""

    evidence: ClassVar[str] = "own"


class Dapo(Planner):
    """Dynamic sampling: a group of equal rewards teaches nothing; drop it and start another.

    Filters on the plain reward, before any shaping. After `drops` drops in a row groups are accepted as they come,
    so that a step always ends.
    """

    paper: ClassVar[str] = "DAPO, section 3.2"
    evidence: ClassVar[str] = "R"
    spread: Annotated[float, Field(ge=0)] = 0.0
    """A group is kept when its rewards' standard deviation is above this."""
    drops: PositiveInt = 160
    """Drops in a row after which a group is accepted all the same."""
    _row: int = PrivateAttr(default=0)

    def decide(self, group: SampleGroup) -> Decision:
        rewards = rewards_of(group)
        if (len(rewards) > 1 and stdev(rewards) > self.spread) or self._row >= self.drops:
            self._row = 0
            return Accept()
        self._row += 1
        return Drop("equal rewards")

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = int(state["row"])


class OneMore(Planner):
    """One sample more than rollout.group_size, and one again if that is even: the median needs an odd group."""

    paper: ClassVar[str] = "MC-GRPO: median-centred GRPO"
    evidence: ClassVar[str] = "R"

    def size(self, group_size: int) -> int:
        return group_size + 1 + group_size % 2


class Oversample(Planner):
    """Twice the samples, for the selector grpo_roc to choose among."""

    paper: ClassVar[str] = "rStar2-Agent (GRPO-RoC), section 3.2"
    evidence: ClassVar[str] = "R"
    factor: Multiple = 2.0
    """Multiple of rollout.group_size."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)


class Broad(Planner):
    """Many samples per prompt: rollout.group_size times `factor`. Lower rollout.groups_per_step to pay for it."""

    paper: ClassVar[str] = "BroRL: broad scaling of rollouts"
    evidence: ClassVar[str] = "P"
    factor: Multiple = 4.0
    """Multiple of rollout.group_size."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)


class Votes(Planner):
    """Test-time RL votes with more samples than it trains: `factor` times rollout.group_size."""

    paper: ClassVar[str] = "TTRL: test-time reinforcement learning"
    evidence: ClassVar[str] = "R"
    factor: Multiple = 2.0
    """Votes per trained sample (64 votes, 32 trained)."""

    def size(self, group_size: int) -> int:
        return round(self.factor * group_size)


class Dars(Planner):
    """More samples for hard prompts, by the accuracy of a first stage.

    p = share of successes among n (0 counts as 0.5 / n). Nothing more at p >= 1/2. With S = 2 p (1 - p) and peak n/2
    ("plain" advantages), or S = 2 sqrt(p (1 - p)) and peak n ("std"): equal = ceil((peak - n S) / S); hardness =
    ceil((2 (1 - p) peak - n S) / S); at most `largest` samples in all. Combine with `dapo` to drop 0 and 1.
    """

    paper: ClassVar[str] = "DARS: difficulty adaptive rollout sampling"
    evidence: ClassVar[str] = "R"
    schedule: Literal["hardness", "equal"] = "hardness"
    """Hard prompts more than equal treatment asks for, or just equal."""
    signal: Literal["std", "plain"] = "std"
    """Whether the advantage divides by the standard deviation."""
    largest: GroupLimit = 32
    """Most samples of a group."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    _stage: dict[str, int] = PrivateAttr(default_factory=dict)

    def limit(self, size: int) -> int:
        return max(size, self.largest)

    def forget(self, group_id: int) -> None:
        self._stage.pop(str(group_id), None)

    def extra(self, p: float, n: int) -> int:
        """Further samples for accuracy `p` of `n`."""
        p = p or 0.5 / n
        if p >= 0.5:
            return 0
        if self.signal == "plain":
            signal, peak = 2 * p * (1 - p), n / 2
        else:
            signal, peak = 2 * math.sqrt(p * (1 - p)), float(n)
        wanted = peak if self.schedule == "equal" else 2 * (1 - p) * peak
        return max(0, min(math.ceil((wanted - n * signal) / signal - 1e-9), self.largest - n))

    def decide(self, group: SampleGroup) -> Decision:
        key = str(group.group_id)
        if self._stage.pop(key, 0):
            return Accept()
        more = self.extra(success_rate(group, self.correct), len(group.samples))
        if not more:
            return Accept()
        self._stage[key] = 1
        return More(more)

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stage = {k: int(v) for k, v in state["stage"].items()}


def purified(
    prompt_ids: Sequence[int], scores: Sequence[float], share: float, protect: Sequence[bool]
) -> tuple[int, ...]:
    """The prompt without the ceil(share n) tokens of the largest score, never a protected one."""
    if not len(prompt_ids) == len(scores) == len(protect):
        raise ValueError(f"{len(prompt_ids)} prompt tokens, {len(scores)} scores, {len(protect)} protections")
    free = [i for i, kept in enumerate(protect) if not kept]
    worst = set(sorted(free, key=lambda i: (-scores[i], i))[: math.ceil(share * len(prompt_ids))])
    return tuple(t for i, t in enumerate(prompt_ids) if i not in worst)


class Lens(Planner):
    """Hard prompts get further samples from a cleaned prompt, without the tokens that disturb the policy most.

    For a group below `below` successes: score each prompt token by |log policy - log reference|, delete the top
    `share`, sample as many again. The selector `lens` puts their successes in the place of failures, the correction
    `lens` trains them on the original prompt. The reference is the server that engine.reference names; special tokens
    are protected.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    below: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Success rate under which a prompt is cleaned."""
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

    def wants_scores(self, group: SampleGroup) -> bool:
        return group.group_id not in self._cleaned and success_rate(group, self.correct) < self.below

    def hear_scores(self, group_id: int, scores: Sequence[float], protect: Sequence[bool]) -> None:
        self._scores[group_id] = (list(scores), list(protect))

    def decide(self, group: SampleGroup) -> Decision:
        told = self._scores.pop(group.group_id, None)
        if group.group_id in self._cleaned:
            self._cleaned.discard(group.group_id)
            return Accept()
        if told is None or success_rate(group, self.correct) >= self.below:
            return Accept()
        self._cleaned.add(group.group_id)
        own = group.samples[0].prompt_ids
        return More(len(group.samples), purified(own, told[0], self.share, told[1]))

    def state_dict(self) -> dict[str, Any]:
        return {"cleaned": sorted(self._cleaned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cleaned = set(state["cleaned"])
