"""Watchdog thread that ends the process when its event loop is blocked.

User code that blocks the loop, such as an async reward, also blocks the time limits that should detect it. All
other processes would wait forever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlsys.core.errors import RunError
from rlsys.obs.role import format_error

CHECKS = 10
"""Number of checks within the time limit."""
_LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")


class StallDetector:
    """Detects a counter that no longer changes. It counts checks, not seconds: a suspended process is not stalled."""

    def __init__(self) -> None:
        self._last_pulse = -1
        self._unchanged = 0

    def stalled(self, pulse: int) -> bool:
        """Check the counter once. Return whether it has not changed for CHECKS checks."""
        self._unchanged = self._unchanged + 1 if pulse == self._last_pulse else 0
        self._last_pulse = pulse
        return self._unchanged >= CHECKS


@contextmanager
def loop_watch(limit: float, in_flight: Callable[[], str]) -> Iterator[None]:
    """Watch the running event loop while the context is active.

    If the loop is blocked for `limit` seconds, print an error of one line and end the process. Uncommitted state is
    lost, as in a crash.

    Args:
        limit: largest number of seconds for which the loop may be blocked.
        in_flight: returns a description of the current work for the error.
    """
    loop = asyncio.get_running_loop()
    finished = threading.Event()
    thread_id = threading.get_ident()
    pulse = [0]
    step = limit / CHECKS

    def beat() -> None:
        pulse[0] += 1
        if not finished.is_set():
            loop.call_later(step / 2, beat)

    def watch() -> None:
        detector = StallDetector()
        while not finished.wait(step):
            if detector.stalled(pulse[0]):
                _exit(f"the event loop was blocked for {limit:g} s at {_user_line(thread_id)}; {in_flight()}")

    beat()
    threading.Thread(target=watch, name="loop watch", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def _user_line(thread: int) -> str:
    """Return the thread's innermost frame outside of libraries as "FILE:LINE (FUNCTION)".

    If all frames are in libraries, return the innermost one.
    """
    innermost = sys._current_frames()[thread]
    user_frame: FrameType | None = innermost
    while user_frame is not None and user_frame.f_code.co_filename.startswith(_LIBRARIES):
        user_frame = user_frame.f_back
    frame = user_frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _exit(message: str) -> None:
    error = RunError(message)
    print(format_error(error), file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(error.exit_code)
