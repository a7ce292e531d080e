"""pytest plug-in that records the last result of every test, for tests/baseline.json, and reports new slow tests.

The file maps a test id to `[outcome, seconds, commit]`: the outcome of the last recorded run
(`passed`, `failed`, `xfailed`, or `not run`), its duration, and the commit that it ran on. Seconds are those of a
reference machine: wall-clock seconds, divided by the ratio of the times of a fixed computation on this machine and on
the reference machine. Every session stores its results in pytest's cache; `make baseline` copies the results of this
machine's sessions into the file. No test fails because of time.

With `--baseline-failures-may-fail`, the last stage of `.ci/run`, a test whose recorded outcome is `failed` or
`not run` does not fail the session: pytest counts it as `xfailed` or `xpassed`, and the summary lists it. A test that
the file does not list is new and must pass.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = Path(__file__).resolve().parents[1] / "baseline.json"
KEY = "rlsys/baseline"
"""Key in pytest's cache."""
NOT_RUN = "not run"
MAY_FAIL = ("failed", NOT_RUN)
REFERENCE_SECONDS = 0.1
"""Seconds of `calibration` on the reference machine, the two-core server on which the file was first written."""
LIMITS = {"check": 2.0, "test": 25.0}
"""Seconds above which the summary lists a new test of a tier. Tests of `make test-all` have no limit."""
MAX_GROWTH = 1.5
"""The summary also lists a test that takes more than this many times its recorded seconds."""


def tier(nodeid: str, marks: Mapping[str, Any]) -> str:
    """Return the first of `make check`, `make test` and `make test-all` that runs the test."""
    if "full" in marks or "slow" in marks:
        return "test-all"
    return "check" if nodeid.startswith("tests/unit/") and "gate" not in marks else "test"


def calibration() -> float:
    """Return the seconds of a fixed computation, the minimum of five repetitions."""
    repetitions = []
    for _ in range(5):
        start = time.perf_counter()
        digest = b""
        for i in range(100_000):
            digest = hashlib.md5(digest + i.to_bytes(4, "little"), usedforsecurity=False).digest()
        repetitions.append(time.perf_counter() - start)
    return min(repetitions)


class Result(NamedTuple):
    """The last recorded run of a test. `seconds`: reference seconds of setup, call and teardown."""

    outcome: str
    seconds: float
    commit: str


def read() -> dict[str, Result]:
    """Return the last recorded result of each test, by test id."""
    rows = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return {nodeid: Result(*row) for nodeid, row in rows.items()}


def write(results: Mapping[str, Result]) -> None:
    """Write the file with one line per test, sorted by test id."""
    lines = [f"{json.dumps(nodeid)}: {json.dumps(row)}" for nodeid, row in sorted(results.items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def durations() -> dict[str, float]:
    """Return the reference seconds of tests whose last run passed, by test id."""
    return {nodeid: row.seconds for nodeid, row in read().items() if row.outcome == "passed"}


def head() -> str:
    """Return the commit of the checkout, with `+` if files differ from it; empty outside of git."""
    root = FILE.parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short=9", "HEAD"], cwd=root, capture_output=True, text=True
    )
    changes = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True
    )
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def slow_and_new(
    seconds: Mapping[str, float], tiers: Mapping[str, str], known: Mapping[str, float]
) -> list[str]:
    """Return a message for each test above its tier's limit and MAX_GROWTH times its recorded duration."""
    lines = []
    for nodeid, took in sorted(seconds.items(), key=lambda pair: -pair[1]):
        limit = LIMITS.get(tiers[nodeid])
        if limit is None or took <= max(limit, MAX_GROWTH * known.get(nodeid, 0.0)):
            continue
        remedy = {"check": "mark it `gate`", "test": "take its mark `gate` off, mark it `full`"}[
            tiers[nodeid]
        ]
        lines.append(
            f"{nodeid} takes {took:.0f} s and is in tier {tiers[nodeid]} (new ones: up to {limit:.0f} s): "
            f"{remedy}, or speed it up"
        )
    return lines


class Recorder:
    """Collects results in the controller process of xdist, or in the only process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._slowdown = calibration() / REFERENCE_SECONDS
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._tiers: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        if self._outcomes.get(report.nodeid, "passed") == "passed" or outcome == "failed":
            self._outcomes[report.nodeid] = outcome
        self._seconds[report.nodeid] = (
            self._seconds.get(report.nodeid, 0.0) + report.duration / self._slowdown
        )
        self._tiers[report.nodeid] = tier(report.nodeid, report.keywords)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not self._config.option.store_baseline:
            return
        cached = {nodeid: Result(*row) for nodeid, row in self._cache.get(KEY, {}).items()}
        results = {**read(), **cached}
        write({item.nodeid: results.get(item.nodeid, Result(NOT_RUN, 0.0, "")) for item in session.items})

    def pytest_sessionfinish(self) -> None:
        commit = head()
        # Skipped tests have no result: `--until` skips tests that do not fit.
        results = {
            nodeid: Result(outcome, round(self._seconds[nodeid], 1), commit)
            for nodeid, outcome in self._outcomes.items()
            if outcome != "skipped"
        }
        if results and hasattr(self._config, "cache"):
            self._cache.set(KEY, {**self._cache.get(KEY, {}), **results})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        passed = {nodeid: s for nodeid, s in self._seconds.items() if self._outcomes[nodeid] == "passed"}
        if lines := slow_and_new(passed, self._tiers, durations()):
            terminalreporter.section("slow tests that tests/baseline.json does not have")
            for line in lines:
                terminalreporter.line(line)

    @property
    def _cache(self) -> pytest.Cache:
        assert self._config.cache is not None
        return self._config.cache


class BaselineFailures:
    """Marks tests as xfail if their recorded outcome is `failed` or `not run`."""

    def __init__(self) -> None:
        self._ids = {nodeid for nodeid, row in read().items() if row.outcome in MAY_FAIL}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run these tests first, so that a session with a time limit reaches them. Files keep their order."""
        for item in items:
            if item.nodeid in self._ids:
                item.add_marker(
                    pytest.mark.xfail(reason="tests/baseline.json: no pass recorded", strict=False)
                )
        items.sort(key=lambda item: item.nodeid not in self._ids)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = [
            f"{word} {report.nodeid}"
            for key, word in (("xfailed", "FAILED"), ("xpassed", "passed"))
            for report in terminalreporter.getreports(key)
            if report.nodeid in self._ids
        ]
        if lines:
            terminalreporter.section("tests without a recorded pass, which do not stop a change")
            for line in lines:
                terminalreporter.line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("baseline")
    group.addoption(
        "--store-baseline",
        action="store_true",
        help="with --collect-only: write the results of earlier sessions to tests/baseline.json",
    )
    group.addoption(
        "--baseline-failures-may-fail",
        action="store_true",
        help="a test whose recorded outcome is `failed` or `not run` does not fail the session",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.baseline_failures_may_fail:
        config.pluginmanager.register(BaselineFailures(), "rlsys-baseline-failures")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "rlsys-baseline")
