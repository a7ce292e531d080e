"""How well the slots of a batch are used, over time."""

from __future__ import annotations


class Occupancy:
    """Integrates over time how many of `slots` have no sample, while it is on."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._busy = 0
        self._since: float | None = None  # None: off
        self._time = self._idle_time = 0.0

    def update(self, now: float, busy: int | None) -> None:
        """From now on so many samples are in flight; None: nobody wants any."""
        if self._since is not None:
            self._time += now - self._since
            self._idle_time += (now - self._since) * max(0.0, 1 - self._busy / self._slots)
        self._since = None if busy is None else now
        self._busy = busy or 0

    def idle_share(self) -> float:
        """Since it was asked for last; 0 when there was no time in between."""
        share = self._idle_time / self._time if self._time else 0.0
        self._time = self._idle_time = 0.0
        return share
