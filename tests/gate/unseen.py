"""`--unseen-may-fail`: the tests of tests/gate/unseen.txt run, and their failures do not fail the session.

pytest plug-in for the last stage of `.ci/run`. The file has those tests of the tiers full and slow that nobody has
seen pass on the tree as it is. Without the option they are tests like all others. With it pytest counts them as
`xfailed` and `xpassed`, which the last line of CI tells; the summary names both. Whoever sees one pass takes it off.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("unseen.txt")


def read(text: str) -> list[str]:
    """Lines that are no comments: a test file, a test, or a test with its parameters."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def is_listed(nodeid: str, lines: Iterable[str]) -> bool:
    """A line stands for itself, and for all that it has inside: a file for its tests, a test for its parameters."""
    return any(nodeid == line or nodeid.startswith((f"{line}::", f"{line}[")) for line in lines)


class Unseen:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if is_listed(item.nodeid, self._lines):
                item.add_marker(
                    pytest.mark.xfail(reason="not seen to pass yet: tests/gate/unseen.txt", strict=False)
                )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        told = [
            (word, report.nodeid)
            for word in ("xfailed", "xpassed")
            for report in terminalreporter.getreports(word)
            if is_listed(report.nodeid, self._lines)
        ]
        if told:
            terminalreporter.section("tests of tests/gate/unseen.txt, which do not stop a change yet")
            for word, nodeid in told:
                terminalreporter.line(f"{'FAILED' if word == 'xfailed' else 'passed'} {nodeid}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("unseen").addoption(
        "--unseen-may-fail",
        action="store_true",
        help="failures of the tests that tests/gate/unseen.txt names are told and do not fail the session",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.unseen_may_fail:
        config.pluginmanager.register(Unseen(read(FILE.read_text(encoding="utf-8"))), "rlsys-unseen")
