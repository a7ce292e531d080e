"""CommandDedup: executes each command of the trainer once, even if its connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlsys.rollout.protocol import RECONNECT_SECONDS, Result


class CommandDedup:
    """Executes commands. Owns the id of the last command, and its task or result.

    The trainer sends one command at a time, with a unique id (an idempotency key). If the connection of a command
    breaks, its task continues, and a request with the same id gets the same result or error. The task is cancelled

    - when another command arrives, because this means that its trainer was replaced;
    - when no connection returns within RECONNECT_SECONDS, because its trainer no longer exists.
    """

    def __init__(self) -> None:
        self._request_id = ""
        self._task: asyncio.Future[Result] | None = None
        self._waiting = 0
        """Number of connections that wait for the task."""
        self._start_lock = asyncio.Lock()
        """Held while the previous task ends, so that a second connection with the same id shares the new task."""
        self._expiry: asyncio.TimerHandle | None = None
        """Cancels a task for which no connection waits."""

    async def run_once(self, request_id: str, run: Callable[[], Awaitable[Result]]) -> Result:
        """Call `run` for the first request with an id, and return its result to all requests with this id.

        Args:
            request_id: id of the request; empty: always call `run`.
        """
        if not request_id:
            return await run()
        async with self._start_lock:
            task = self._task
            if task is None or request_id != self._request_id or task.cancelled():
                await self.close()
                task = asyncio.ensure_future(run())
                self._request_id, self._task = request_id, task
        if self._expiry is not None:
            self._expiry.cancel()
        self._waiting += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting -= 1
            if not self._waiting and not task.done():
                self._expiry = asyncio.get_running_loop().call_later(RECONNECT_SECONDS, task.cancel)

    async def close(self) -> None:
        """Cancel the current task and discard its result."""
        task, self._task, self._request_id = self._task, None, ""
        if self._expiry is not None:
            self._expiry.cancel()
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
