"""Durations of phases, for metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Phases:
    """Timer of phases: sequential ones (`add`, `call`), or concurrent ones of several engines (`concurrent`)."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        """Start the timer. Metrics are called `{prefix}_{name}`."""
        self._prefix = prefix
        self._seconds = dict.fromkeys(names, 0.0)
        self._started = time.monotonic()

    def call(self, name: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work`, add its duration to the phase, and return its result."""
        with self.add(name):
            return work(*args, **kwargs)

    @contextmanager
    def concurrent(self, name: str) -> Iterator[None]:
        """Time a phase of one engine, concurrent with those of others: the slowest counts."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = max(self._seconds[name], time.monotonic() - start)

    @contextmanager
    def add(self, name: str) -> Iterator[None]:
        """Time a phase whose durations are summed."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - start

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the phases."""
        return {f"{self._prefix}_{name}": seconds for name, seconds in self._seconds.items()}

    @property
    def with_total(self) -> dict[str, float]:
        """Metrics of the phases, and the total time as `{prefix}`."""
        return {self._prefix: time.monotonic() - self._started, **self.metrics}
