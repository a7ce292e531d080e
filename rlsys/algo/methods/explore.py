"""A group's size from what engines that explore make of its prompt (Sol-RL's pattern). No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar

from pydantic import PrivateAttr

from rlsys.algo.planners import GroupLimit, Planner, PositiveInt, rewards_of
from rlsys.core.types import SampleGroup

WINDOW = 256
"""Groups that the correlation is of: the last ones that were kept for training."""
FEWEST = 3
"""Groups of which it says anything."""


class Explore(Planner):
    """Most samples for prompts that engines of a pool with role explore answer rightly half of the time.

    Sol-RL explores with cheap numerics and trains what exact ones make. Of a language model a seed does not give the
    same response with other numerics, so what is taken over here is a number alone. These engines answer each new
    prompt `probes` times, as training samples it; nothing of that is trained. With p the share of answers above
    `correct`, the group gets

        first + round((largest - first) 4 p (1 - p))

    samples: `first` where all answers are alike, `largest` at p = 1/2, where p (1 - p), the variance that a group's
    rewards have, is largest. Groups begin with `first` at once, and get the others when the answers are known. One
    whose prompt nobody could try out gets rollout.group_size. The size formula is ours.

    Metrics, since the process began: `explored` groups and `explored_not`; `explore_correlation`, Spearman's rank
    correlation of the mean rewards that probes and training samples had, over the last 256 groups kept for training.
    """

    paper: ClassVar[str] = "Sol-RL: explore in low precision, train in high (the pattern)"
    evidence: ClassVar[str] = "own"
    probes: PositiveInt = 8
    """Answers to each prompt."""
    first: GroupLimit = 4
    """Fewest samples of a group."""
    largest: GroupLimit = 16
    """Most samples of a group."""
    correct: float = 0.5
    """An answer is a success when its reward is above this."""
    _usual: int = PrivateAttr(default=0)
    """rollout.group_size, as far as other planners leave it."""
    _means: dict[int, float | None] = PrivateAttr(default_factory=dict)
    """Of groups that have their size: the mean reward of their probes, None without any."""
    _pairs: deque[tuple[float, float]] = PrivateAttr(default_factory=lambda: deque(maxlen=WINDOW))
    """Mean rewards of probes and of samples."""
    _explored: int = PrivateAttr(default=0)
    _not: int = PrivateAttr(default=0)

    def needs(self) -> frozenset[str]:
        return frozenset({"probes"})

    def size(self, group_size: int) -> int:
        self._usual = group_size
        return self.first

    def limit(self, size: int) -> int:
        return max(size, self.largest, self._usual)

    def size_for(self, p: float) -> int:
        """Samples of a group, for a share `p` of successes."""
        return self.first + round((self.largest - self.first) * 4 * p * (1 - p))

    def wants_probes(self, group_id: int) -> int:
        return 0 if group_id in self._means else self.probes

    def hear_probes(self, group_id: int, rewards: Sequence[float]) -> int:
        if not rewards:
            self._not += 1
            self._means[group_id] = None
            return max(0, self._usual - self.first)
        self._explored += 1
        self._means[group_id] = fmean(rewards)
        return self.size_for(sum(r > self.correct for r in rewards) / len(rewards)) - self.first

    def closed(self, group: SampleGroup, *, kept: bool) -> None:
        mean = self._means.pop(group.group_id, None)
        if kept and mean is not None:
            self._pairs.append((mean, fmean(rewards_of(group))))

    def forget(self, group_id: int) -> None:
        self._means.pop(group_id, None)

    @property
    def counts(self) -> dict[str, float]:
        found = {"explored": float(self._explored), "explored_not": float(self._not)}
        rho = rank_correlation(list(self._pairs))
        return found if rho is None else {**found, "explore_correlation": rho}

    def state_dict(self) -> dict[str, Any]:
        return {"means": {str(group_id): mean for group_id, mean in self._means.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means = {int(group_id): mean for group_id, mean in state["means"].items()}


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's: Pearson's correlation of the ranks, equal values sharing the mean of theirs. None for fewer than
    three pairs, and where either side is the same everywhere."""
    if len(pairs) < FEWEST:
        return None
    xs, ys = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) - 1) / 2
    dx, dy = [x - mean for x in xs], [y - mean for y in ys]
    spread = (sum(d * d for d in dx) * sum(d * d for d in dy)) ** 0.5
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / spread if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """From 0; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            found[place] = (start + end) / 2
        start = end + 1
    return found
