"""Group size from the results of exploration engines for its prompt (Sol-RL's pattern). No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar

from pydantic import PrivateAttr

from rlsys.algo.planners import GroupLimit, Planner, PositiveInt, rewards_of
from rlsys.core.types import SampleGroup

WINDOW = 256
"""Number of groups in the correlation: those that were accepted for training last."""
FEWEST = 3
"""Smallest number of groups for the correlation."""


class Explore(Planner):
    """Assign more samples to prompts that exploration engines answer correctly about half of the time.

    Sol-RL explores in low precision and trains in high precision. A language model does not give the same response
    for a seed in another precision, so exploration provides only a success rate. Engines of a pool with role explore
    answer each new prompt `probes` times, with the sampling of training; none of these answers is trained. With p
    the share of answers with a reward above `correct`, the group gets

        first + round((largest - first) 4 p (1 - p))

    samples: `first` if all answers are equal, `largest` at p = 1/2, where p (1 - p), the variance of a group's
    rewards, is largest. Groups start with `first` samples and get the others when the probes are complete. A group
    whose prompt could not be explored gets rollout.group_size. The paper uses another formula for the size.

    Metrics, since the process started: `explored` groups and `explored_not`; `explore_correlation`, Spearman's rank
    correlation between the mean rewards of probes and training samples, over the last 256 groups accepted for
    training.
    """

    paper: ClassVar[str] = "Sol-RL: explore in low precision, train in high (the pattern)"
    evidence: ClassVar[str] = "own"
    probes: PositiveInt = 8
    """Number of probes per prompt."""
    first: GroupLimit = 4
    """Minimum number of samples of a group."""
    largest: GroupLimit = 16
    """Maximum number of samples of a group."""
    correct: float = 0.5
    """An answer is a success if its reward is above this."""
    _usual: int = PrivateAttr(default=0)
    """rollout.group_size, after other planners."""
    _means: dict[int, float | None] = PrivateAttr(default_factory=dict)
    """Group id -> mean reward of its probes, None without probes; for groups that have their size."""
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
        """Return the number of samples of a group for a share `p` of successes."""
        return self.first + round((self.largest - self.first) * 4 * p * (1 - p))

    def needs_probes(self, group_id: int) -> int:
        return 0 if group_id in self._means else self.probes

    def receive_probes(self, group_id: int, rewards: Sequence[float]) -> int:
        if not rewards:
            self._not += 1
            self._means[group_id] = None
            return max(0, self._usual - self.first)
        self._explored += 1
        self._means[group_id] = fmean(rewards)
        return self.size_for(sum(r > self.correct for r in rewards) / len(rewards)) - self.first

    def on_decided(self, group: SampleGroup, *, accepted: bool) -> None:
        mean = self._means.pop(group.group_id, None)
        if accepted and mean is not None:
            self._pairs.append((mean, fmean(rewards_of(group))))

    def forget(self, group_id: int) -> None:
        self._means.pop(group_id, None)

    @property
    def counts(self) -> dict[str, float]:
        counts = {"explored": float(self._explored), "explored_not": float(self._not)}
        rho = rank_correlation(list(self._pairs))
        return counts if rho is None else {**counts, "explore_correlation": rho}

    def state_dict(self) -> dict[str, Any]:
        return {"means": {str(group_id): mean for group_id, mean in self._means.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means = {int(group_id): mean for group_id, mean in state["means"].items()}


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Compute Spearman's correlation: Pearson's correlation of the ranks, ties with their mean rank.

    None for fewer than three pairs, and if either side is constant.
    """
    if len(pairs) < FEWEST:
        return None
    xs, ys = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) - 1) / 2
    dx, dy = [x - mean for x in xs], [y - mean for y in ys]
    spread = (sum(d * d for d in dx) * sum(d * d for d in dy)) ** 0.5
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / spread if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """Rank the values from 0; ties get their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    mean_ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in order[start : end + 1]:
            mean_ranks[position] = (start + end) / 2
        start = end + 1
    return mean_ranks
