"""Test of names and docstrings: violations per package may only decrease (tests/gate/names.py)."""

from __future__ import annotations

from tests.gate import names

RECORDED = {
    "rlsys": 14,
    "rlsys/agents": 159,
    "rlsys/algo": 449,
    "rlsys/config": 78,
    "rlsys/convert": 154,
    "rlsys/data": 202,
    "rlsys/engine": 156,
    "rlsys/engine_requests": 28,
    "rlsys/environments": 97,
    "rlsys/gateway": 132,
    "rlsys/generators": 2,
    "rlsys/ops": 11,
    "rlsys/planning": 68,
    "rlsys/rehearse": 79,
    "rlsys/rewards": 115,
    "rlsys/tenants": 126,
    "rlsys/trainer": 386,
    "rlsys/venv_runner": 1,
    "rlsys/viewer": 83,
    "rlsys/weights_relay": 61,
}
"""Package -> its violations. Lower a number after a clean-up; a package without a row has none."""


def test_violations_only_decrease() -> None:
    growth = {
        package: (RECORDED.get(package, 0), count)
        for package, count in names.totals().items()
        if count > RECORDED.get(package, 0)
    }
    assert not growth, "recorded and today's violations; `python -m tests.gate.names PACKAGE` lists them"
