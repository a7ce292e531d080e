"""Fake clocks."""

from __future__ import annotations

import time


class FakeClock:
    """A fake of the module `time`: `sleep` returns at once and advances `now` by its seconds."""

    strftime, time = staticmethod(time.strftime), staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
