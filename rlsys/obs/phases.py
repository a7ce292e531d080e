"""Timer of the phases of an operation, for metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Phases:
    """Timer of the phases of an operation: sequential phases (`add`, `call`), or concurrent ones (`concurrent`)."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        """Start the timer.

        Args:
            prefix: prefix of the metrics, which are named PREFIX_NAME.
            names: names of the phases.
        """
        self._prefix = prefix
        self._seconds = dict.fromkeys(names, 0.0)
        self._started = time.monotonic()

    def call(self, name: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work`, add its duration to the phase, and return its result."""
        with self.add(name):
            return work(*args, **kwargs)

    @contextmanager
    def concurrent(self, name: str) -> Iterator[None]:
        """Time the context as a phase of one engine. The duration of the phase is that of the slowest engine."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = max(self._seconds[name], time.monotonic() - start)

    @contextmanager
    def add(self, name: str) -> Iterator[None]:
        """Time the context, and add its duration to the phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - start

    @property
    def metrics(self) -> dict[str, float]:
        """Duration of each phase in seconds, as PREFIX_NAME."""
        return {f"{self._prefix}_{name}": seconds for name, seconds in self._seconds.items()}

    @property
    def with_total(self) -> dict[str, float]:
        """`metrics`, and the seconds since the start of the timer as PREFIX."""
        return {self._prefix: time.monotonic() - self._started, **self.metrics}
