"""XRPO's planner: further samples where they tell most, and a solved problem where nobody succeeds. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, stdev
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import (
    Accept,
    Decision,
    GroupLimit,
    More,
    Planner,
    PositiveInt,
    rewards_of,
    success_rate,
)
from rlsys.types import Sample, SampleGroup, Status


def student_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else Cornish-Fisher to 1 / freedom^3."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z, f = NormalDist().inv_cdf(p), float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / f + second / f**2 + third / f**3


class Xrpo(Planner):
    """More samples where they shrink the uncertainty of the mean reward most, in rounds.

    h = t(1 - alpha/2, n - 1) s / sqrt(n), half the confidence interval of the group's mean reward. The score of
    `round` more samples is h's expected drop plus an exploration bonus c sqrt(ln(groups seen) / n). A group gets a
    round when its score is among the top `share` of recent ones. The bonus, the sizes and the threshold against
    recent groups (the paper allots in a closed round) are our reading.

    Seeding: a group without any success gets a round of samples that see solved problems first, as earlier turns of
    the chat, and are trained on the plain prompt. Which problems and how many are our reading, too.
    """

    paper: ClassVar[str] = "XRPO, adaptive rollout allocation"
    evidence: ClassVar[str] = "P"
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """1 minus the confidence of the interval."""
    round: PositiveInt = 4
    """Samples of one round."""
    largest: GroupLimit = 32
    """Most samples of a group."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of groups that get a further round."""
    bonus: Annotated[float, Field(ge=0)] = 0.05
    """Weight c of the exploration bonus."""
    recent: PositiveInt = 128
    """Scores that the share is taken of."""
    exemplars: Annotated[int, Field(ge=0)] = 1
    """Solved problems before the prompt of a group without success, the latest ones; 0: no seeding."""
    exemplar_tokens: PositiveInt = 256
    """Longest problem with its response that serves as one."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    _scores: list[float] = PrivateAttr(default_factory=list)
    _seen: int = PrivateAttr(default=0)
    _solved: dict[int, list[int]] = PrivateAttr(default_factory=dict)
    """Prompt index -> its prompt and a right response; the latest last."""
    _seeded: set[int] = PrivateAttr(default_factory=set)

    def limit(self, size: int) -> int:
        return max(size, self.largest)

    def half_width(self, spread: float, n: int) -> float:
        return student_quantile(1 - self.alpha / 2, n - 1) * spread / math.sqrt(n) if n > 1 else math.inf

    def score(self, rewards: Sequence[float]) -> float:
        """Expected drop of the half-width from a further round, plus the bonus."""
        n = len(rewards)
        if n < 2:
            return math.inf
        spread = stdev(rewards)
        drop = self.half_width(spread, n) - self.half_width(spread, n + self.round)
        return drop + self.bonus * math.sqrt(math.log(max(self._seen, 2)) / n)

    def forget(self, group_id: int) -> None:
        self._seeded.discard(group_id)

    def _remember(self, group: SampleGroup) -> None:
        """The group's shortest right response to its own prompt, when it is short enough."""
        own = [s.prompt_ids + s.response_ids for s in group.samples if self._is_exemplar(s)]
        if own and len(shortest := min(own, key=len)) <= self.exemplar_tokens:
            self._solved.pop(group.prompt_index, None)
            self._solved[group.prompt_index] = shortest
            while len(self._solved) > self.exemplars + 1:  # one of them may be of the prompt that asks
                del self._solved[next(iter(self._solved))]

    def _is_exemplar(self, sample: Sample) -> bool:
        right = sample.reward is not None and sample.reward > self.correct
        return right and sample.status is Status.FINISHED and sample.trained_prompt is None

    def seeded_prompt(self, group: SampleGroup) -> tuple[int, ...]:
        """The group's prompt behind solved ones; empty when none is known."""
        others = [ids for index, ids in self._solved.items() if index != group.prompt_index]
        shown = others[-self.exemplars :] if self.exemplars else []
        return (*(i for ids in shown for i in ids), *group.samples[0].prompt_ids) if shown else ()

    def decide(self, group: SampleGroup) -> Decision:
        self._remember(group)
        if group.group_id in self._seeded:
            self._seeded.discard(group.group_id)
            return Accept()
        room = min(self.round, self.largest - len(group.samples))
        failed = success_rate(group, self.correct) == 0
        if failed and room > 0 and (seeded := self.seeded_prompt(group)):
            self._seeded.add(group.group_id)
            return More(room, seeded)
        return self._allot(group, room)

    def _allot(self, group: SampleGroup, room: int) -> Decision:
        """A further round, when few recent groups have gained more by one."""
        score = self.score(rewards_of(group))
        self._seen += 1
        earlier = sorted(self._scores)
        self._scores = [*self._scores, score][-self.recent :]
        if room <= 0 or not earlier:
            return Accept()
        bar = earlier[min(len(earlier) - 1, math.floor((1 - self.share) * len(earlier)))]
        return More(room) if score > bar else Accept()

    def state_dict(self) -> dict[str, Any]:
        solved = [[index, *ids] for index, ids in self._solved.items()]
        return {"scores": self._scores, "seen": self._seen, "solved": solved, "seeded": sorted(self._seeded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scores, self._seen = [float(s) for s in state["scores"]], int(state["seen"])
        self._solved = {index: ids for index, *ids in state["solved"]}
        self._seeded = set(state["seeded"])
