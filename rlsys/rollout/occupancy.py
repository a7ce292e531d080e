"""Occupancy: utilization of the slots of a batch over time."""

from __future__ import annotations


class Occupancy:
    """Measures the share of `slots` without a sample, averaged over the time in which the measurement is on."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._busy = 0
        self._updated_at: float | None = None  # None: off
        self._time = self._idle_time = 0.0

    def update(self, time: float, busy: int | None) -> None:
        """Set the number of samples in flight from now on.

        Args:
            time: current time of any clock, in seconds.
            busy: number of samples in flight; None: turn the measurement off.
        """
        if self._updated_at is not None:
            self._time += time - self._updated_at
            self._idle_time += (time - self._updated_at) * max(0.0, 1 - self._busy / self._slots)
        self._updated_at = None if busy is None else time
        self._busy = busy or 0

    def idle_share(self) -> float:
        """Return the idle share since the last call; 0 if no time passed."""
        share = self._idle_time / self._time if self._time else 0.0
        self._time = self._idle_time = 0.0
        return share
