"""What each test took, kept in tests/durations.json; the summary tells a new test that is slow for its tier.

pytest plug-in. Seconds are those of a reference machine: seconds of the clock, divided by how much longer than there
a fixed computation takes here. Every session leaves its durations in pytest's cache; `make durations` copies what the
sessions on this machine left into the file, which has the format of pytest-split (test id -> seconds).
Nothing fails because of time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[1] / "durations.json"
KEY = "rlsys/durations"
"""In pytest's cache."""
REFERENCE_SECONDS = 0.1
"""What `calibration` takes on the reference machine, the two-core server on which the file was first written."""
SHORTEST = 0.5
"""Shorter tests are left out of the file: they decide nothing, and their times would change with every run."""
LIMITS = {"check": 2.0, "test": 25.0}
"""Seconds from which a new test of a tier is told. `make test-all` alone may take longer."""
GROWN = 1.5
"""A test is told, too, when it takes this many times what the file says."""


def tier(nodeid: str, marks: Mapping[str, Any]) -> str:
    """The first of `make check`, `make test` and `make test-all` that runs the test."""
    if "full" in marks or "slow" in marks:
        return "test-all"
    return "check" if nodeid.startswith("tests/unit/") and "gate" not in marks else "test"


def calibration() -> float:
    """Seconds of a fixed computation, the least of five tries."""
    tries = []
    for _ in range(5):
        start = time.perf_counter()
        digest = b""
        for i in range(100_000):
            digest = hashlib.md5(digest + i.to_bytes(4, "little"), usedforsecurity=False).digest()
        tries.append(time.perf_counter() - start)
    return min(tries)


def recorded() -> dict[str, float]:
    """Test id -> reference seconds."""
    known: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return known


def slow_and_new(
    seconds: Mapping[str, float], tiers: Mapping[str, str], known: Mapping[str, float]
) -> list[str]:
    """A line for each test that is above its tier's limit and that the file does not know to be so."""
    told = []
    for nodeid, took in sorted(seconds.items(), key=lambda pair: -pair[1]):
        limit = LIMITS.get(tiers[nodeid])
        if limit is None or took <= max(limit, GROWN * known.get(nodeid, 0.0)):
            continue
        other = {"check": "mark it `gate`", "test": "take its mark `gate` off, mark it `full`"}[tiers[nodeid]]
        told.append(
            f"{nodeid} takes {took:.0f} s and is in tier {tiers[nodeid]} (new ones: up to {limit:.0f} s): "
            f"{other}, or speed it up"
        )
    return told


class Durations:
    """The process that reports: with xdist the one that hands out the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._slower = calibration() / REFERENCE_SECONDS
        self._seconds: dict[str, float] = {}
        self._tiers: dict[str, str] = {}
        self._left_out: set[str] = set()
        """Tests that were skipped or failed: how long they take is not known by that."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed or report.nodeid in self._left_out:
            self._left_out.add(report.nodeid)
            self._seconds.pop(report.nodeid, None)
            return
        took = report.duration / self._slower
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + took
        self._tiers[report.nodeid] = tier(report.nodeid, report.keywords)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._config.option.store_durations:
            left = {**recorded(), **self._cache.get(KEY, {})}
            here = {item.nodeid for item in session.items}
            kept = {name: round(s, 1) for name, s in sorted(left.items()) if name in here and s >= SHORTEST}
            FILE.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")

    def pytest_sessionfinish(self) -> None:
        if self._seconds and hasattr(self._config, "cache"):
            self._cache.set(KEY, {**self._cache.get(KEY, {}), **self._seconds})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if told := slow_and_new(self._seconds, self._tiers, recorded()):
            terminalreporter.section("slow tests that tests/durations.json does not know")
            for line in told:
                terminalreporter.line(line)

    @property
    def _cache(self) -> pytest.Cache:
        assert self._config.cache is not None
        return self._config.cache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("durations").addoption(
        "--store-durations",
        action="store_true",
        help="with --collect-only: write what earlier sessions took to tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config), "rlsys-durations")
