"""So many places, of which one taker may need several. First come, first served: no large one waits for ever."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """Belongs to one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, n: int) -> AsyncIterator[None]:
        """For as long as this lasts, once they are free. More than there are would wait for ever."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((n, turn))
        self._serve()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._free += n
            self._serve()  # also when it gave up waiting: those behind it may fit

    def _serve(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._free):
            n, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= n
                turn.set_result(None)
