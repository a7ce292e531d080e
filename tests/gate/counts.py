"""pytest plug-in that sums the counts of several sessions: each appends its counts to the file RLSYS_TEST_COUNTS.

`python -m tests.gate.counts FILE` prints the sums in the form of pytest's last line.
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
"""pytest's names of outcomes, in pytest's order."""
XPASSED_FILES = "xpassed_files"
"""Key of: test file -> number of its tests that passed although their recorded outcome is no pass."""


class Counts:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._start = time.time()

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats
        counts = {name: len(stats[name]) for name in SHOWN if stats.get(name)}
        files = Counter(report.nodeid.partition("::")[0] for report in stats.get("xpassed", ()))
        with self._file.open("a", encoding="utf-8") as out:
            out.write(
                json.dumps({**counts, "seconds": time.time() - self._start, XPASSED_FILES: files}) + "\n"
            )


def unexpected_passes(lines: list[str]) -> str:
    """Return, for all sessions, `passed without a recorded pass: tests/a.py 3, tests/b.py 1`, or "" without any."""
    files: Counter[str] = Counter()
    for line in lines:
        files.update(json.loads(line).get(XPASSED_FILES, {}))
    file_counts = ", ".join(f"{name} {count}" for name, count in sorted(files.items()))
    return file_counts and f"passed without a recorded pass: {file_counts}"


def total(lines: list[str]) -> str:
    """Return the sums of all sessions, as `12 failed, 900 passed in 631.20s`."""
    sums: Counter[str] = Counter()
    for line in lines:
        row = json.loads(line)
        row.pop(XPASSED_FILES, None)
        sums.update(row)
    seconds = sums.pop("seconds", 0)
    plural = {"error": "errors" if sums["error"] > 1 else "error", "warnings": "warnings"}
    words = [f"{sums[name]} {plural.get(name, name)}" for name in SHOWN if sums[name]]
    return f"{', '.join(words) or 'no tests ran'} in {seconds:.2f}s"


def pytest_configure(config: pytest.Config) -> None:
    if (name := os.environ.get(VARIABLE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counts(Path(name)), "rlsys-counts")


if __name__ == "__main__":
    counts_file = Path(sys.argv[1])
    sessions = counts_file.read_text().splitlines() if counts_file.exists() else []
    if passes := unexpected_passes(sessions):
        print(passes)
    print(f" {total(sessions)} ".center(100, "="))
