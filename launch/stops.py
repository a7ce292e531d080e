"""Stops from outside: signals, and lost machines."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from rlsys.core.errors import RlsysError, RunError
from rlsys.obs.role import without_ignored


class StoppedBySignal(RlsysError):
    """A clean stop by a signal; the same command resumes the run."""

    def __init__(self, number: int, resume_point: str = "") -> None:
        """Create the error. `resume_point`: where the run stands, and from where it continues."""
        name, point = signal.Signals(number).name, resume_point and f" {resume_point}"
        super().__init__(f"stopped by {name}{point}; the same command resumes the run")
        self.number = number
        self.exit_code = 128 + number


class NodeLost(RunError):
    """Machines of the run are lost, with all of their processes; the run can continue on others."""

    def __init__(self, names: list[str]) -> None:
        self.names = f"node {names[0]} is" if len(names) == 1 else f"nodes {', '.join(names)} are"
        super().__init__(f"{self.names} lost; the same command resumes the run when there are enough nodes")


class StopSignals:
    """Counts Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: the first one requests a clean stop, the second an immediate one.

    Signals that this process inherited as ignored are not counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        self._interrupts = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignals]:
        """Handle the signals until the context ends."""
        numbers = without_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        handlers = {n: signal.signal(n, self._on_signal) for n in numbers}
        try:
            yield self
        finally:
            for n, handler in handlers.items():
                signal.signal(n, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal interrupt code that cannot check `count`, and raise StoppedBySignal."""
        self._interrupts = True
        try:
            if self.count:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            raise StoppedBySignal(self.number) from None
        finally:
            self._interrupts = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.number = number
        if self._interrupts:
            raise KeyboardInterrupt  # not caught where a plug-in's errors are tolerated
