"""While the ledger is opened, which may take minutes: whoever asks hears that it goes on, and how far it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
from aiohttp import web

from rlsys.core.owner import Owner
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import error_text, guarded_app, serving
from rlsys.obs.coordinator import publish
from rlsys.rollout.protocol import OPENING_STATUS

TOLD_SECONDS = 10.0
"""Between two lines in the log."""
MIB = 2**20

T = TypeVar("T")

log = logging.getLogger("rlsys.rollout")


async def open_while_telling(path: Path, open_it: Callable[[], T], owner: Owner) -> T:
    """What `open_it` returns; it runs in a thread. Until then whoever asks the rollout process is told how far."""
    begun = _bytes_read()

    def words() -> str:
        size = path.stat().st_size // MIB if path.exists() else 0
        return f"opening the ledger of {size:,} MiB: {(_bytes_read() - begun) // MIB:,} MiB read"

    async def tell(_: web.Request) -> web.Response:
        return web.Response(status=OPENING_STATUS, text=words())

    app = guarded_app([web.route("*", "/{any:.*}", tell)], ServerLimits(), error_text)
    async with serving(app, owner.rollout_socket):
        publish(owner)
        task = asyncio.ensure_future(asyncio.to_thread(open_it))
        while not (await asyncio.wait({task}, timeout=TOLD_SECONDS))[0]:
            log.info(words())
        return task.result()


def _bytes_read() -> int:
    """By this process so far, from files and caches; 0 where the system does not count them."""
    process = psutil.Process()
    return int(process.io_counters().read_chars) if hasattr(process, "io_counters") else 0
