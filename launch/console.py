"""Messages of the supervisor to the display and to logs/supervisor.log."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

_PROGRESS_SECONDS = 5.0
"""Minimum time between two lines about the progress of a role."""
_DISPLAY_ERRORS = (OSError, SystemExit)
"""Errors of writing to the display; rich raises SystemExit if the reader has closed the pipe."""


class Display(Protocol):
    """Display of a run for a person."""

    def phase(self, text: str) -> None: ...
    def entry(self, entry: dict[str, Any], *, live: bool) -> None: ...
    def status(self, status: dict[str, Any]) -> None: ...


class Console:
    """Writes messages of the supervisor.

    A closed terminal or a full disk does not stop the run. The log counts the lines that could not be written to it.
    """

    def __init__(self, display: Display, log: Callable[[], Path]) -> None:
        """Create the console. `log`: returns the path of the log."""
        self._display, self._log = display, log
        self._unwritten = 0
        """Number of consecutive lines that could not be written to the log."""
        self._progress, self._progress_time = "", 0.0

    def report(self, text: str) -> None:
        """Write a line to the log and the display."""
        missing = (
            f"({self._unwritten} lines before this one could not be written)\n" if self._unwritten else ""
        )
        try:
            with self._log().open("a", encoding="utf-8") as log:
                log.write(f"{missing}{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._unwritten = 0
        except OSError:
            self._unwritten += 1
        self._show(text)

    def progress(self, text: str) -> bool:
        """Show the progress of long work, such as opening a ledger, at most once in _PROGRESS_SECONDS.

        Returns:
            Whether the text is new and was shown.
        """
        if text == self._progress or time.monotonic() - self._progress_time <= _PROGRESS_SECONDS:
            return False
        self._progress, self._progress_time = text, time.monotonic()
        self._show(text)
        return True

    def entry(self, entry: dict[str, Any], *, live: bool) -> None:
        """Show a line of metrics."""
        with suppress(*_DISPLAY_ERRORS):
            self._display.entry(entry, live=live)

    def status(self, status: dict[str, Any]) -> None:
        """Show the status of the rollout process."""
        with suppress(*_DISPLAY_ERRORS):
            self._display.status(status)

    def _show(self, text: str) -> None:
        with suppress(*_DISPLAY_ERRORS):
            self._display.phase(text)
