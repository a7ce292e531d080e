"""Stops of a run by signals and by lost machines."""

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
        """Create the error.

        Args:
            number: the signal.
            resume_point: text about the state of the run, and where it will continue.
        """
        suffix = f" {resume_point}" if resume_point else ""
        super().__init__(
            f"stopped by {signal.Signals(number).name}{suffix}; the same command resumes the run"
        )
        self.number = number
        self.exit_code = 128 + number


class NodeLost(RunError):
    """Machines of the run are lost, with all of their processes. The run can continue on other machines."""

    def __init__(self, names: list[str]) -> None:
        """Create the error. `names`: names of the nodes."""
        subject = f"node {names[0]} is" if len(names) == 1 else f"nodes {', '.join(names)} are"
        self.event = f"{subject} lost"
        super().__init__(f"{self.event}; the same command resumes the run when enough nodes are available")


class StopSignals:
    """Counts SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1.

    The first signal requests a clean stop, the second an immediate stop. Signals that this process inherited as
    ignored are not counted.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of signals."""
        self.number = 0
        """The last signal."""
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
        """Let a signal interrupt the context, whose code cannot check `count`.

        Raises:
            StoppedBySignal: a signal arrived before or during the context.
        """
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
            raise KeyboardInterrupt  # code that tolerates a plug-in's errors catches only Exception
