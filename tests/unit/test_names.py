"""Test of names and docstrings: violations per package may only decrease (tests/gate/names.py)."""

from __future__ import annotations

from tests.gate import names

RECORDED: dict[str, int] = {}
"""Package -> its violations. Lower a number after a clean-up; a package without a row has none."""


def test_violations_only_decrease() -> None:
    growth = {
        package: (RECORDED.get(package, 0), count)
        for package, count in names.totals().items()
        if count > RECORDED.get(package, 0)
    }
    assert not growth, "recorded and today's violations; `python -m tests.gate.names PACKAGE` lists them"
