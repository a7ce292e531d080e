"""A ledger that takes long to open: it is told how far that is, and waited for."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from pathlib import Path

import aiohttp
import pytest

from rlsys.core.errors import RunError
from rlsys.core.owner import claim
from rlsys.rollout import client
from rlsys.rollout.client import RolloutClient
from rlsys.rollout.startup_progress import open_with_progress
from tests.helpers.clocks import FakeClock

TIMEOUT = 240.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(client, "time", clock)
    return clock


def answering(monkeypatch: pytest.MonkeyPatch, answers: object) -> RolloutClient:
    monkeypatch.setattr(RolloutClient, "_http", lambda *_: next(answers))  # type: ignore[call-overload]
    return RolloutClient(Path("nowhere"), "key")


def test_the_trainer_waits_while_opening_the_ledger_makes_progress(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the trainer gave up after engine.start_timeout, however far the ledger was."""
    opening = ((503, f"opening the ledger: {i // 100} MiB".encode()) for i in range(5000))
    ready = (200, json.dumps({"engines_ready": True}).encode())
    answering(monkeypatch, itertools.chain(opening, [ready])).wait_ready(TIMEOUT)
    assert clock.now > 4 * TIMEOUT


def test_the_trainer_times_out_if_opening_the_ledger_makes_no_progress(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = answering(monkeypatch, itertools.repeat((503, b"opening the ledger: 7 MiB read")))
    with pytest.raises(RunError, match="not ready after 240 s: opening the ledger: 7 MiB read"):
        stuck.wait_ready(TIMEOUT)
    assert clock.now == pytest.approx(TIMEOUT, abs=1)


async def test_requests_while_the_ledger_opens_get_its_progress(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"x" * 3 * 2**20)
    go_on = threading.Event()
    (tmp_path / "s").mkdir()
    owner = claim(tmp_path, tmp_path / "s")

    def open_it() -> int:
        go_on.wait()
        return len(path.read_bytes())

    task = asyncio.create_task(open_with_progress(path, open_it, owner))
    url = "http://localhost"
    while not owner.rollout_socket.exists():
        await asyncio.sleep(0)
    connector = aiohttp.UnixConnector(str(owner.rollout_socket))
    async with aiohttp.ClientSession(connector=connector) as session:
        for path_asked in ("/status", "/ledger"):
            async with session.get(url + path_asked) as answer:
                assert answer.status == 503
                assert (await answer.text()).startswith("opening the ledger of 3 MiB: ")
        go_on.set()
        assert await task == 3 * 2**20
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url)
