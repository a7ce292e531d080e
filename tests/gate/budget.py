"""pytest plug-in for `--until TIME`: start no test that would end after that time, and list the skipped tests.

The expected duration of a test is its duration in tests/baseline.json times the slowdown of this machine relative to
the reference machine. A test that takes longer than expected is not interrupted.
"""

from __future__ import annotations

import time

import pytest

from tests.gate.baseline import REFERENCE_SECONDS, calibration, durations

UNKNOWN_SECONDS = 60.0
"""Expected seconds of a test that is not in the file."""


class Budget:
    """Skips tests that do not fit. `skipped`: their ids."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._slowdown = calibration() / REFERENCE_SECONDS
        self._expected = durations()
        self.skipped: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        expected = self._expected.get(item.nodeid, UNKNOWN_SECONDS) * self._slowdown
        if time.time() + expected > self._until:
            self.skipped.append(item.nodeid)
            pytest.skip("no time left for it")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section(f"{len(self.skipped)} tests did not run: no time left")
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("budget").addoption(
        "--until",
        type=float,
        metavar="TIME",
        help="start no test that would end after this time (seconds since 1970), and list the skipped tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.until is not None:
        config.pluginmanager.register(Budget(config.option.until), "rlsys-budget")
