"""What ends a run from outside: signals, and machines that are gone."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from rlsys.core.errors import RlsysError, RunError
from rlsys.obs.role import unless_ignored


class Stopped(RlsysError):
    """Stopped from outside, cleanly; the same command goes on."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; the same command goes on with this run")
        self.number = number
        self.exit_code = 128 + number


class NodeLost(RunError):
    """Machines of the run are gone, and everything on them; the run can go on with others."""

    def __init__(self, names: list[str]) -> None:
        self.names = f"node {names[0]} is" if len(names) == 1 else f"nodes {', '.join(names)} are"
        super().__init__(f"{self.names} gone; the same command goes on when there are enough nodes")


class StopSignals:
    """Counts Ctrl-C, SIGTERM, SIGHUP and SIGUSR1; the first asks for a clean stop, the second for one at once. One
    that this process was started to ignore is not counted."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        self._breaks_off = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignals]:
        numbers = unless_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {n: signal.signal(n, self._hear) for n in numbers}
        try:
            yield self
        finally:
            for n, handler in before.items():
                signal.signal(n, handler)

    @contextlib.contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Around what cannot look at `count`: a signal ends it where it is, and Stopped is raised."""
        self._breaks_off = True
        try:
            if self.count:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            raise Stopped(self.number) from None
        finally:
            self._breaks_off = False

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.number = number
        if self._breaks_off:
            raise KeyboardInterrupt  # which no tolerance of a plug-in's errors catches
