"""CommandDedup: executes each command of the trainer once, even if its connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlsys.rollout.protocol import RECONNECT_SECONDS, Result


class CommandDedup:
    """Owns the id, and the task or result, of the last command.

    The trainer sends one command at a time, with a unique id (an idempotency key). If its connection breaks,
    the task continues, and a request with the same id gets the same result or error. The task is cancelled when
    another command arrives, since its trainer was then replaced, and when no connection has come back within
    RECONNECT_SECONDS: a take would otherwise wait for a trainer that is gone.
    """

    def __init__(self) -> None:
        self._name = ""
        self._task: asyncio.Future[Result] | None = None
        self._waiting = 0
        """Number of connections that wait for the task."""
        self._beginning = asyncio.Lock()
        """Held until the previous task has ended: a second connection with the same id then finds the new one."""
        self._expiry: asyncio.TimerHandle | None = None

    async def run_once(self, name: str, run: Callable[[], Awaitable[Result]]) -> Result:
        """Call `run` for the first request with this id, and return its result to all.

        A request without an id calls it each time.
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
        """Cancel the current task, and forget the result."""
        task, self._task, self._name = self._task, None, ""
        if self._expiry is not None:
            self._expiry.cancel()
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
