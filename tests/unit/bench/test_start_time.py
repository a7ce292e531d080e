"""What bench/start_time.py reads from a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import start_time

from rlsys.core.owner import claim
from rlsys.core.sockets import make_folder
from rlsys.obs import coordinator
from tests.helpers.rollout_rig import make_config, rig
from tests.helpers.service_rig import served


async def test_received_tokens_come_from_the_coordinators_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = claim(tmp_path, make_folder())
    monkeypatch.setattr("tests.helpers.service_rig.OWNER", owner)
    run = start_time.Run(tmp_path, begin=0.0, alive=lambda: True)
    assert run.tokens() == 0, "the coordinator has not started"
    async with rig(make_config(tmp_path), lambda s: 3) as r, served(r):
        coordinator.publish_address(owner)
        await r.start()
        await r.take(1)
        assert await asyncio.to_thread(run.tokens) == r.router.received > 0
    assert run.tokens() == 0, "the coordinator has ended"
