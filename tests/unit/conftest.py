"""Event loops of async tests: asyncio's default, or with the mark `virtual_clock` one in virtual time.

In unit tests a preflight builds no trainer, because its process takes seconds; tests/integration/test_trial_build.py
covers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rlsys.planner.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_clock"):
        return {"virtual clock": VirtualLoop}
    return {"clock": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def no_trial_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.rehearse.trial.check_build", lambda config: None)
