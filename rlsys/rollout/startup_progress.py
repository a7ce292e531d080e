"""Opens the ledger while the service reports the progress, because a large ledger takes minutes."""

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
from rlsys.obs.coordinator import publish_address
from rlsys.rollout.protocol import OPENING_STATUS

LOG_SECONDS = 10.0
"""Interval of log lines."""
MIB = 2**20

T = TypeVar("T")

log = logging.getLogger("rlsys.rollout")


async def open_with_progress(path: Path, open_ledger: Callable[[], T], owner: Owner) -> T:
    """Run `open_ledger` in a thread and return its result. Meanwhile, answer every request with the progress.

    Args:
        path: file of the ledger, for its size.
        owner: the launch; requests arrive at its rollout socket.
    """
    start_bytes = _bytes_read()

    def message() -> str:
        size = path.stat().st_size // MIB if path.exists() else 0
        return f"opening the ledger of {size:,} MiB: {(_bytes_read() - start_bytes) // MIB:,} MiB read"

    async def respond(_: web.Request) -> web.Response:
        return web.Response(status=OPENING_STATUS, text=message())

    app = guarded_app([web.route("*", "/{any:.*}", respond)], ServerLimits(), error_text)
    async with serving(app, owner.rollout_socket):
        publish_address(owner)
        task = asyncio.ensure_future(asyncio.to_thread(open_ledger))
        while not (await asyncio.wait({task}, timeout=LOG_SECONDS))[0]:
            log.info(message())
        return task.result()


def _bytes_read() -> int:
    """Return the bytes that this process has read; 0 on systems without this counter."""
    process = psutil.Process()
    return int(process.io_counters().read_chars) if hasattr(process, "io_counters") else 0
