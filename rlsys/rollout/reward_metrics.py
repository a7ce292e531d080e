"""RewardMetrics: means of the additional metrics that reward functions return, as in verl."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


class RewardMetrics:
    """Mean of each metric over the samples that have it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one sample."""
        for name, value in metrics.items():
            self._sums[name] += value
            self._counts[name] += 1

    def take(self) -> dict[str, float]:
        """Return the means since the last call, and reset them."""
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._sums.clear()
        self._counts.clear()
        return means
