"""What the supervisor says: to whoever watches, and to logs/supervisor.log."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

_OPENING_SECONDS = 5.0
"""Between two lines about a ledger that is being opened."""


class Display(Protocol):
    """What shows a run to a person."""

    def phase(self, text: str) -> None: ...
    def entry(self, entry: dict[str, Any], *, live: bool) -> None: ...
    def status(self, status: dict[str, Any]) -> None: ...


class Voice:
    """A full disk or a closed terminal ends no run: lines that could not be written are counted."""

    def __init__(self, display: Display, log: Callable[[], Path]) -> None:
        self._display, self._log = display, log
        self._unsaid = 0
        """Lines in a row that could neither be shown nor logged."""
        self._opening, self._last_told = "", 0.0

    def say(self, text: str) -> None:
        """To the display and the log."""
        missing = f"({self._unsaid} lines before this one could not be written)\n" if self._unsaid else ""
        try:
            self._display.phase(text)
            with self._log().open("a", encoding="utf-8") as log:
                log.write(f"{missing}{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._unsaid = 0
        except OSError:
            self._unsaid += 1

    def opening(self, words: str) -> bool:
        """A large ledger takes minutes to open; they are neither a hang nor to be passed over in silence. Whether
        there was something new to show."""
        if words == self._opening or time.monotonic() - self._last_told <= _OPENING_SECONDS:
            return False
        self._opening, self._last_told = words, time.monotonic()
        self._display.phase(words)
        return True
