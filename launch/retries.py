"""Engines that a run goes on without (launch.min_engines), and when each is tried again."""

from __future__ import annotations

import time

_AGAIN_SECONDS, _LONGEST_AWAY = 60.0, 900.0
"""Until an engine that was given up is tried again; twice as long each time."""


class GivenUp:
    """By unit."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        """Of units that were given up since they last worked: how long the next time lasts."""

    def __contains__(self, unit: str) -> bool:
        return unit in self._until

    def __len__(self) -> int:
        return len(self._until)

    def add(self, unit: str) -> float:
        """Seconds until it is tried again."""
        wait = self._waits.get(unit, _AGAIN_SECONDS)
        self._waits[unit] = min(2 * wait, _LONGEST_AWAY)
        self._until[unit] = time.monotonic() + wait
        return wait

    def due(self) -> list[str]:
        """Those whose time has come: they are given up no longer."""
        now = time.monotonic()
        found = [unit for unit, until in self._until.items() if now >= until]
        for unit in found:
            del self._until[unit]
        return found

    def works(self, unit: str) -> None:
        """It answers again."""
        self._waits.pop(unit, None)
