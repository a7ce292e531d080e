"""Clocks that only a test moves."""

from __future__ import annotations

import time


class FalseClock:
    """In the place of the module `time`: a sleep takes none, and `now` is as many seconds later."""

    strftime, time = staticmethod(time.strftime), staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
