"""A thread that ends the process when its event loop stands still.

User code that blocks in the loop (an async reward, say) stops everything that could notice it there, time limits as
well, and every other process would wait for ever.
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
"""Looks of the thread within the limit."""
_LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")


class Stillness:
    """Counts looks at a pulse, not seconds: a process that was stopped as a whole has not stood still."""

    def __init__(self) -> None:
        self._seen, self._looks = -1, 0

    def look(self, pulse: int) -> bool:
        """Whether it has been the same for CHECKS looks."""
        self._looks = self._looks + 1 if pulse == self._seen else 0
        self._seen = pulse
        return self._looks >= CHECKS


@contextmanager
def loop_watch(limit: float, in_flight: Callable[[], str]) -> Iterator[None]:
    """The running loop is watched. Ends the process with one line: where the loop stands after `limit` seconds, and
    what is `in_flight`. What was not committed is lost, as by a crash.
    """
    loop, ended = asyncio.get_running_loop(), threading.Event()
    place, pulse, step = threading.get_ident(), [0], limit / CHECKS

    def beat() -> None:
        pulse[0] += 1
        if not ended.is_set():
            loop.call_later(step / 2, beat)

    def watch() -> None:
        stillness = Stillness()
        while not ended.wait(step):
            if stillness.look(pulse[0]):
                _end(f"the event loop has stood still for {limit:g} s at {_line(place)}; {in_flight()}")

    beat()
    threading.Thread(target=watch, name="loop watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _line(thread: int) -> str:
    """What it executes: the innermost line that is in no library, if there is one."""
    innermost = sys._current_frames()[thread]
    at: FrameType | None = innermost
    while at is not None and at.f_code.co_filename.startswith(_LIBRARIES):
        at = at.f_back
    frame = at or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _end(why: str) -> None:
    error = RunError(why)
    print(format_error(error), file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(error.exit_code)
