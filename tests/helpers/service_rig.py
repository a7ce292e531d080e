"""The rollout service of a rig on a real Unix socket, and blocking calls to it while the scripted router ticks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from rlsys.core.owner import Owner
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.rollout.client import RolloutClient
from rlsys.rollout.service import make_app
from tests.helpers.rollout_rig import Rig

T = TypeVar("T")

OWNER = Owner(Path("run"), 1, "the launch's key")


@asynccontextmanager
async def served(r: Rig, ready: Callable[[], bool] = lambda: True) -> AsyncIterator[RolloutClient]:
    app = make_app(r.manager, ready, OWNER)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    sockets = OWNER.sockets if OWNER.sockets != Path() else make_folder()
    await web.UnixSite(runner, sockets / "rollout").start()
    try:
        yield RolloutClient(sockets / "rollout", OWNER.key)
    finally:
        await runner.cleanup()
        remove_folder(sockets)


async def ticking(r: Rig, call: Callable[..., T], *args: Any) -> T:
    """Run a blocking call in a thread while the scripted router ticks, and return its result."""
    task = asyncio.create_task(asyncio.to_thread(call, *args))
    while not task.done():
        r.router.tick()
        await asyncio.sleep(0.001)
    return task.result()
