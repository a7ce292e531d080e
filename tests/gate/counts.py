"""Several sessions as one: each adds its counts to a file, and the last line of CI has their sums.

pytest plug-in, with RLSYS_TEST_COUNTS set to a file's path; `python -m tests.gate.counts FILE` prints the sums as
pytest ends a session.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "RLSYS_TEST_COUNTS"
SHOWN = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "error")
"""pytest's own words, in its order."""


class Counts:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._start = time.time()

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats
        counts = {name: len(stats[name]) for name in SHOWN if stats.get(name)}
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**counts, "seconds": time.time() - self._start}) + "\n")


def total(lines: list[str]) -> str:
    """`12 failed, 900 passed in 631.20s` of all sessions."""
    sums: Counter[str] = Counter()
    for line in lines:
        sums.update(json.loads(line))
    seconds = sums.pop("seconds", 0)
    plural = {"error": "errors" if sums["error"] > 1 else "error", "warnings": "warnings"}
    words = [f"{sums[name]} {plural.get(name, name)}" for name in SHOWN if sums[name]]
    return f"{', '.join(words) or 'no tests ran'} in {seconds:.2f}s"


def pytest_configure(config: pytest.Config) -> None:
    if (name := os.environ.get(VARIABLE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counts(Path(name)), "rlsys-counts")


if __name__ == "__main__":
    given = Path(sys.argv[1])
    print(f" {total(given.read_text().splitlines() if given.exists() else [])} ".center(100, "="))
