"""Means of what reward functions say beside the reward: verl's metrics in a dictionary, for instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


class Means:
    """Of each name, over the samples that had it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._sums[name] += value
            self._counts[name] += 1

    def take(self) -> dict[str, float]:
        """The means so far; begins anew."""
        found = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._sums.clear()
        self._counts.clear()
        return found
