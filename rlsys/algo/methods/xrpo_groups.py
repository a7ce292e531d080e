"""XRPO's planner: additional samples for informative groups, and solved problems for groups without success.

Imports no torch, because it runs in the rollout process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.methods.similarity import most_alike
from rlsys.algo.planners import (
    Accept,
    AddSamples,
    Decision,
    GroupLimit,
    Hold,
    Planner,
    PositiveInt,
    rewards_of,
    success_rate,
)
from rlsys.algo.prompts import stream
from rlsys.core.types import SampleGroup, Status


def student_quantile(p: float, freedom: int) -> float:
    """Return the quantile `p` of Student's t distribution with `freedom` degrees of freedom.

    The result is exact for 1 and 2 degrees of freedom, otherwise a Cornish-Fisher expansion up to 1 / freedom^3.
    """
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z, f = NormalDist().inv_cdf(p), float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / f + second / f**2 + third / f**3


@dataclass(frozen=True)
class Member:
    """A group that waits in the open round.

    Attributes:
        rewards: Rewards of its samples.
        capacity: Number of samples that can still be added.
        new: Whether this is its first round.
    """

    rewards: list[float]
    capacity: int
    new: bool


class Xrpo(Planner):
    """Add samples to the groups in which they reduce the uncertainty of the mean reward most.

    Rounds: finished groups wait in a round until it has `groups` new groups, or until no other group runs. Then the
    groups with the largest h(n) - h(n + 1) + bonus sqrt(ln(1 + T) / n) get up to `samples` additional samples, and
    join a later round. Their number is on average `share` of the number of new groups. h(n) = t(1 - alpha/2, n - 1) s
    / sqrt(n) is half the width of the confidence interval of the mean of a group's n rewards with standard deviation
    s, and T is the number of samples of all groups of the round. A group in which all samples succeed gets none. In
    the paper, a round is the batch of a step, in three phases; rlsys chose the sizes of rounds.

    Seeding: a group without success gets samples whose prompt starts with solved problems, as earlier turns of the
    chat. They are trained on the group's prompt. The paper uses the two problems that are nearest by an embedding.
    rlsys uses the nearest among the last `memory` solved problems, by TF-IDF cosine of the prompts' tokens.
    """

    paper: ClassVar[str] = "XRPO, adaptive rollout allocation"
    evidence: ClassVar[str] = "P"
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """1 minus the confidence level of the interval."""
    groups: PositiveInt = 8
    """Number of new groups that close a round."""
    samples: PositiveInt = 4
    """Largest number of additional samples of a group in one round."""
    largest: GroupLimit = 32
    """Largest number of samples of a group."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Number of groups with additional samples per new group of a round."""
    bonus: Annotated[float, Field(ge=0)] = 0.05
    """Weight of the exploration bonus."""
    exemplars: Annotated[int, Field(ge=0)] = 2
    """Number of solved problems before the prompt of an additional sample in a group without success; 0: no
    seeding."""
    exemplar_tokens: PositiveInt = 256
    """Largest number of tokens of a solved problem with its response."""
    memory: Annotated[int, Field(gt=0, le=1024)] = 64
    """Number of stored solved problems."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    _members: dict[int, Member] = PrivateAttr(default_factory=dict)
    """Group id -> member of the open round. After a restart, groups join the round when they are decided again."""
    _released: dict[int, Decision] = PrivateAttr(default_factory=dict)
    """Group id -> decision of the last round that `decide` has not returned yet."""
    _enlarged: set[int] = PrivateAttr(default_factory=set)
    """Ids of groups that got samples in a round."""
    _credit: float = PrivateAttr(default=0.0)
    """Fraction of a group with additional samples that is carried over from earlier rounds, below 1."""
    _solved: dict[int, list[list[int]]] = PrivateAttr(default_factory=dict)
    """Prompt index -> token ids of the prompt and of a correct response, in the order of solving."""
    _seeded: set[int] = PrivateAttr(default_factory=set)
    """Ids of running groups with samples that start with solved problems."""

    def limit(self, size: int) -> int:
        return max(size, self.largest)

    def half_width(self, deviation: float, n: int) -> float:
        """Return h(n) for `n` rewards with this standard deviation; inf for a single reward."""
        return student_quantile(1 - self.alpha / 2, n - 1) * deviation / math.sqrt(n) if n > 1 else math.inf

    def score(self, rewards: Sequence[float], round_samples: int) -> float:
        """Return the expected decrease of the half-width by one more sample, plus the exploration bonus.

        Args:
            rewards: rewards of a group.
            round_samples: number of samples of all groups of the round.
        """
        n = len(rewards)
        if n < 2:
            return math.inf
        deviation = stdev(rewards)
        decrease = self.half_width(deviation, n) - self.half_width(deviation, n + 1)
        return decrease + self.bonus * math.sqrt(math.log1p(round_samples) / n)

    def forget(self, group_id: int) -> None:
        self._members.pop(group_id, None)
        self._released.pop(group_id, None)
        self._seeded.discard(group_id)
        self._enlarged.discard(group_id)

    # -- seeding ------------------------------------------------------------------------------------------------

    def _remember(self, group: SampleGroup) -> None:
        """Store the group's shortest correct response to its own prompt, if it is short enough."""
        candidates = [
            s
            for s in group.samples
            if s.reward is not None
            and s.reward > self.correct
            and s.status is Status.FINISHED
            and s.trained_prompt is None
        ]
        if not candidates or not self.exemplars:
            return
        shortest = min(candidates, key=lambda s: len(s.response_ids))
        if len(shortest.prompt_ids) + len(shortest.response_ids) <= self.exemplar_tokens:
            self._solved.pop(group.prompt_index, None)
            self._solved[group.prompt_index] = [shortest.prompt_ids, [*shortest.response_ids]]
            if len(self._solved) > self.memory:
                del self._solved[next(iter(self._solved))]

    def seeded_prompt(self, group: SampleGroup) -> tuple[int, ...]:
        """Return the most similar solved problems, the most similar last, followed by the group's prompt.

        Return no tokens if no other problem has been solved.
        """
        exemplars = [exemplar for index, exemplar in self._solved.items() if index != group.prompt_index]
        prompt_ids = group.samples[0].prompt_ids
        nearest = most_alike(prompt_ids, [prompt for prompt, _ in exemplars], self.exemplars)
        if not nearest:
            return ()
        exemplar_ids: list[int] = []
        for index in reversed(nearest):
            prompt, response = exemplars[index]
            exemplar_ids += [*prompt, *response]
        return (*exemplar_ids, *prompt_ids)

    # -- rounds -------------------------------------------------------------------------------------------------

    def decide(self, group: SampleGroup) -> Decision:
        group_id = group.group_id
        if (decision := self._released.pop(group_id, None)) is not None:
            return decision
        self._remember(group)
        if group_id in self._seeded:
            self._seeded.discard(group_id)
            return Accept()
        capacity = min(self.samples, self.largest - len(group.samples))
        failed = success_rate(group, self.correct) == 0
        if failed and capacity > 0 and (seeded := self.seeded_prompt(group)):
            self._seeded.add(group_id)
            self._enlarged.discard(group_id)
            return AddSamples(capacity, seeded)
        self._members[group_id] = Member(rewards_of(group), capacity, group_id not in self._enlarged)
        if sum(m.new for m in self._members.values()) < self.groups:
            return Hold()
        self.close_round()
        return self._released.pop(group_id)

    def waiting(self) -> frozenset[int]:
        return frozenset(self._members)

    def released(self) -> frozenset[int]:
        return frozenset(self._released)

    def restart(self) -> None:
        self._enlarged |= {g for g, m in self._members.items() if not m.new}
        self._members, self._released = {}, {}

    def close_round(self) -> None:
        members, self._members = self._members, {}
        round_samples = sum(len(m.rewards) for m in members.values())
        self._credit += self.share * sum(m.new for m in members.values())
        slots = math.floor(self._credit + 1e-9)
        self._credit = max(0.0, self._credit - slots)
        candidates = [
            g for g, m in members.items() if m.capacity > 0 and min(m.rewards, default=1) <= self.correct
        ]
        # Groups with the same rewards have the same score; a draw orders them, not the order in which they finished.
        candidates.sort(
            key=lambda g: (
                -round(self.score(members[g].rewards, round_samples), 9),
                stream("xrpo", g).random(),
            )
        )
        selected = set(candidates[:slots])
        self._enlarged = (self._enlarged - members.keys()) | selected
        self._released |= {
            g: AddSamples(m.capacity) if g in selected else Accept() for g, m in members.items()
        }

    def state_dict(self) -> dict[str, Any]:
        solved = [[index, *example] for index, example in self._solved.items()]
        enlarged = sorted(self._enlarged | {g for g, m in self._members.items() if not m.new})
        return {"credit": self._credit, "solved": solved, "seeded": sorted(self._seeded), "grown": enlarged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._credit, self._enlarged = float(state["credit"]), set(state["grown"])
        self._solved = {index: example for index, *example in state["solved"]}
        self._seeded = set(state["seeded"])
