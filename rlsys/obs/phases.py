"""Seconds of the phases of a piece of work, for metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Phases:
    """Of several engines that are worked on at once, a phase's seconds are those of the slowest; of one that comes
    several times in turn, see `add`."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        """Metrics are called `{prefix}_{name}`."""
        self._prefix = prefix
        self._seconds = dict.fromkeys(names, 0.0)

    @contextmanager
    def at_once(self, name: str) -> Iterator[None]:
        """Around a phase of one engine, beside those of others."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = max(self._seconds[name], time.monotonic() - start)

    @contextmanager
    def add(self, name: str) -> Iterator[None]:
        """Around a phase whose times add up."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - start

    @property
    def metrics(self) -> dict[str, float]:
        return {f"{self._prefix}_{name}": seconds for name, seconds in self._seconds.items()}
