"""Seconds of the phases of a piece of work, for metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Phases:
    """Seconds of phases: of one after the other (`add`, `call`), or of several engines at once (`at_once`)."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        """Metrics are called `{prefix}_{name}`."""
        self._prefix = prefix
        self._seconds = dict.fromkeys(names, 0.0)
        self._started = time.monotonic()

    def call(self, name: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What `work` returns; its seconds are added to the phase's."""
        with self.add(name):
            return work(*args, **kwargs)

    @contextmanager
    def at_once(self, name: str) -> Iterator[None]:
        """Around a phase of one engine, beside those of others: the slowest counts."""
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

    @property
    def with_total(self) -> dict[str, float]:
        """The metrics, and `{prefix}`: seconds since the beginning."""
        return {self._prefix: time.monotonic() - self._started, **self.metrics}
