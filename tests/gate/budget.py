"""`--until TIME`: a session that starts no test which would end after that moment, and names those it left out.

pytest plug-in. How long a test takes is what tests/baseline.json says of it, times how much slower than the
reference this machine is. Nothing is cut off: a test that runs longer than expected still ends.
"""

from __future__ import annotations

import time

import pytest

from tests.gate.baseline import REFERENCE_SECONDS, calibration, durations

UNKNOWN_SECONDS = 60.0
"""Expected of a test that is not in the file."""


class Budget:
    """Skips what does not fit; `left` has the ids of what was skipped."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._slower = calibration() / REFERENCE_SECONDS
        self._expected = durations()
        self.left: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        expected = self._expected.get(item.nodeid, UNKNOWN_SECONDS) * self._slower
        if time.time() + expected > self._until:
            self.left.append(item.nodeid)
            pytest.skip("no time left for it")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.section(f"{len(self.left)} tests did not run: no time left")
            for nodeid in self.left:
                terminalreporter.line(nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("budget").addoption(
        "--until",
        type=float,
        metavar="TIME",
        help="start no test that would end after this moment (seconds since 1970), and name those left out",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.until is not None:
        config.pluginmanager.register(Budget(config.option.until), "rlsys-budget")
