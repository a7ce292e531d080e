"""Planner that sets the size of a group from the results of exploration engines (Sol-RL's pattern).

Imports no torch, because it runs in the rollout process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar

from pydantic import PrivateAttr

from rlsys.algo.planners import GroupLimit, Planner, PositiveInt, rewards_of
from rlsys.core.types import SampleGroup

WINDOW = 256
"""Number of groups last accepted for training that the correlation covers."""
MIN_GROUPS = 3
"""Smallest number of groups for a correlation."""


class Explore(Planner):
    """Assign more samples to prompts that exploration engines answer correctly about half of the time.

    Engines of a pool with role explore answer each new prompt `probes` times with the run's sampling parameters;
    these answers are not trained. If p is the share of answers with a reward above `correct`, the group has

        first + round((largest - first) 4 p (1 - p))

    samples. These are `first` samples for p = 0 and 1, and `largest` samples for p = 1/2, where the variance p (1 -
    p) of the rewards is largest. A group starts with `first` samples and gets the others when the probes are
    complete. If the probes fail, it has rollout.group_size samples.

    Sol-RL explores in low precision and trains the same samples in high precision. A language
    model does not give the same response for a seed in another precision, so here exploration provides only a success
    rate. The paper uses another formula for the size.

    Metrics, since the start of the process:
    - `explored`: groups with complete probes;
    - `explored_not`: groups whose probes failed;
    - `explore_correlation`: Spearman's rank correlation between the mean rewards of probes and of training samples,
      over the last 256 groups accepted for training.
    """

    paper: ClassVar[str] = "Sol-RL: explore in low precision, train in high (the pattern)"
    evidence: ClassVar[str] = "own"
    probes: PositiveInt = 8
    """Number of probes per prompt."""
    first: GroupLimit = 4
    """Smallest number of samples of a group."""
    largest: GroupLimit = 16
    """Largest number of samples of a group."""
    correct: float = 0.5
    """An answer is a success if its reward is above this."""
    _group_size: int = PrivateAttr(default=0)
    """Size of a group without probes: rollout.group_size, changed by earlier planners."""
    _probe_means: dict[int, float | None] = PrivateAttr(default_factory=dict)
    """Group id -> mean reward of its probes, None if they failed; for undecided groups after `receive_probes`."""
    _mean_pairs: deque[tuple[float, float]] = PrivateAttr(default_factory=lambda: deque(maxlen=WINDOW))
    """Mean reward of the probes and of the samples of each accepted group."""
    _explored: int = PrivateAttr(default=0)
    _unexplored: int = PrivateAttr(default=0)

    def needs(self) -> frozenset[str]:
        return frozenset({"probes"})

    def size(self, group_size: int) -> int:
        self._group_size = group_size
        return self.first

    def limit(self, size: int) -> int:
        return max(size, self.largest, self._group_size)

    def size_for(self, p: float) -> int:
        """Return the number of samples of a group whose probes have a share `p` of successes."""
        return self.first + round((self.largest - self.first) * 4 * p * (1 - p))

    def needs_probes(self, group_id: int) -> int:
        return 0 if group_id in self._probe_means else self.probes

    def receive_probes(self, group_id: int, rewards: Sequence[float]) -> int:
        if not rewards:
            self._unexplored += 1
            self._probe_means[group_id] = None
            return max(0, self._group_size - self.first)
        self._explored += 1
        self._probe_means[group_id] = fmean(rewards)
        return self.size_for(sum(r > self.correct for r in rewards) / len(rewards)) - self.first

    def on_decided(self, group: SampleGroup, *, accepted: bool) -> None:
        mean = self._probe_means.pop(group.group_id, None)
        if accepted and mean is not None:
            self._mean_pairs.append((mean, fmean(rewards_of(group))))

    def forget(self, group_id: int) -> None:
        self._probe_means.pop(group_id, None)

    @property
    def counts(self) -> dict[str, float]:
        counts = {"explored": float(self._explored), "explored_not": float(self._unexplored)}
        rho = rank_correlation(list(self._mean_pairs))
        return counts if rho is None else {**counts, "explore_correlation": rho}

    def state_dict(self) -> dict[str, Any]:
        return {"means": {str(group_id): mean for group_id, mean in self._probe_means.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._probe_means = {int(group_id): mean for group_id, mean in state["means"].items()}


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Compute Spearman's rank correlation: Pearson's correlation of the ranks, where ties have their mean rank.

    Return None for fewer than MIN_GROUPS pairs, and if either side is constant.
    """
    if len(pairs) < MIN_GROUPS:
        return None
    xs, ys = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) - 1) / 2
    dx = [x - mean for x in xs]
    dy = [y - mean for y in ys]
    norm = (sum(d * d for d in dx) * sum(d * d for d in dy)) ** 0.5
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / norm if norm else None


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 0 for the smallest; ties have their mean rank."""
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
