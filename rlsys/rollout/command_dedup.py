"""CommandDedup: executes each command of the trainer once, even if its connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlsys.rollout.protocol import RECONNECT_SECONDS, Result


class CommandDedup:
    """Executes commands. Owns the id of the last command, and its task or result.

    The trainer sends one command at a time, with a unique id (an idempotency key). If its connection breaks,
    the task continues, and a request with the same id gets the same result or error. The task is cancelled when
    another command arrives, because its trainer was then replaced, and when no connection returns within
    RECONNECT_SECONDS: a take would otherwise wait for a trainer that no longer exists.
    """

    def __init__(self) -> None:
        self._name = ""
        self._task: asyncio.Future[Result] | None = None
        self._waiting = 0
        """Number of connections that wait for the task."""
        self._beginning = asyncio.Lock()
        """Held while the previous task ends, so that a second connection with the same id shares the new task."""
        self._expiry: asyncio.TimerHandle | None = None

    async def run_once(self, name: str, run: Callable[[], Awaitable[Result]]) -> Result:
        """Call `run` for the first request with an id, and return its result to all requests with this id.

        Args:
            name: id of the request; empty: always call `run`.
        """
        if not name:
            return await run()
        async with self._beginning:
            task = self._task
            if task is None or name != self._name or task.cancelled():
                await self.close()
                task = asyncio.ensure_future(run())
                self._name, self._task = name, task
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
        task, self._task, self._name = self._task, None, ""
        if self._expiry is not None:
            self._expiry.cancel()
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
