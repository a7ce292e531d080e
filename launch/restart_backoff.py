"""Backoff of the engines without which the run continues (launch.min_engines)."""

from __future__ import annotations

import time

_FIRST_WAIT, _MAX_WAIT = 60.0, 900.0
"""First and longest time in seconds until a dropped engine is restarted. The time doubles with each failure."""


class RestartBackoff:
    """Dropped units, and the times of their restarts."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        """Unit -> time of its restart (time.monotonic)."""
        self._waits: dict[str, float] = {}
        """Unit that has failed and has not worked since then -> seconds of its next wait."""

    def __contains__(self, unit: str) -> bool:
        return unit in self._until

    def __len__(self) -> int:
        return len(self._until)

    def add(self, unit: str) -> float:
        """Add a unit, and return the seconds until its restart."""
        wait = self._waits.get(unit, _FIRST_WAIT)
        self._waits[unit] = min(2 * wait, _MAX_WAIT)
        self._until[unit] = time.monotonic() + wait
        return wait

    def due(self) -> list[str]:
        """Remove and return the units whose wait has ended."""
        current_time = time.monotonic()
        units = [unit for unit, until in self._until.items() if current_time >= until]
        for unit in units:
            del self._until[unit]
        return units

    def reset(self, unit: str) -> None:
        """Reset the next wait of a unit that works again to the first wait."""
        self._waits.pop(unit, None)
