"""LoopThread: an event loop in a separate thread, for connectors of asynchronous packages."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any


class LoopThread:
    """An event loop in a thread, shared by all episodes of a process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop, and wait for its result. Must be called from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def begin(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start a coroutine in the loop, and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)
