"""Carries each command of the trainer out once, however often the connection that brought it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlsys.rollout.protocol import RECONNECT_SECONDS, Result


class Once:
    """Of the command that came last: what it is called, and its work or its result.

    The trainer gives one command at a time, under a name that it uses once. When a connection breaks, the work goes
    on. Whoever comes with the same name waits for the same work, or hears the same result or error. The work is
    cancelled when another command comes, because its trainer has been replaced then, and when nobody has come back
    within RECONNECT_SECONDS: a take would otherwise wait for a trainer that is gone.
    """

    def __init__(self) -> None:
        self._name = ""
        self._work: asyncio.Future[Result] | None = None
        self._waiting = 0
        """Connections that wait for the work."""
        self._beginning = asyncio.Lock()
        """Held until the work before has ended: a second connection with the same name then finds the new one."""
        self._patience: asyncio.TimerHandle | None = None

    async def result(self, name: str, run: Callable[[], Awaitable[Result]]) -> Result:
        """What `run` returns or raises, run for the first to bring this name. Without a name: run each time."""
        if not name:
            return await run()
        async with self._beginning:
            work = self._work
            if work is None or name != self._name or work.cancelled():
                await self.close()
                work = asyncio.ensure_future(run())
                self._name, self._work = name, work
        if self._patience is not None:
            self._patience.cancel()
        self._waiting += 1
        try:
            return await asyncio.shield(work)
        finally:
            self._waiting -= 1
            if not self._waiting and not work.done():
                self._patience = asyncio.get_running_loop().call_later(RECONNECT_SECONDS, work.cancel)

    async def close(self) -> None:
        """End the work that is under way, and forget the result."""
        work, self._work, self._name = self._work, None, ""
        if self._patience is not None:
            self._patience.cancel()
        if work is not None and not work.done():
            work.cancel()
            await asyncio.wait([work])
