"""Places in the engine: so many samples at once, of so many adapters, and tenants in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Request:
    """`samples`: places that it takes. `turn`: done when it has them."""

    adapter: str | None
    samples: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SamplePlaces:
    """Belongs to one event loop.

    Each tenant has two queues, for requests with an adapter and without one, and the queues take turns. A request
    that does not fit yet holds up those behind it, so that no large one waits for ever; one whose adapter is one too
    many holds up other requests with adapters only.
    """

    def __init__(self, samples: int, adapters: int) -> None:
        self._samples, self._adapters = samples, adapters
        self._free = samples
        self._active: Counter[str] = Counter()
        """Requests in the engine, by adapter."""
        self._queues: dict[tuple[str, bool], deque[_Request]] = {}
        """The one whose turn is next stands first."""

    @asynccontextmanager
    async def take(self, tenant: str, adapter: str | None, samples: int) -> AsyncIterator[None]:
        """For as long as this lasts, once they are free. More samples than places take all of them."""
        request = _Request(adapter, min(samples, self._samples))
        self._queues.setdefault((tenant, adapter is not None), deque()).append(request)
        self._admit()
        try:
            await request.turn
            yield
        finally:
            if not request.turn.cancelled():
                self._free += request.samples
                if adapter is not None:
                    self._active[adapter] -= 1
                    self._active += Counter()  # without zeros
            self._admit()  # also when it gave up waiting: those behind it may fit

    def _admit(self) -> None:
        full, progress = False, True
        while progress:
            progress = False
            for key, queue in list(self._queues.items()):
                while queue and queue[0].turn.cancelled():
                    queue.popleft()
                if not queue:
                    del self._queues[key]
                    continue
                if (request := queue[0]).adapter is not None and not self._has_room(request.adapter):
                    full = True
                if full and request.adapter is not None:
                    continue
                if request.samples > self._free:
                    return
                queue.popleft()
                self._queues[key] = self._queues.pop(key)  # its next turn comes last
                self._free -= request.samples
                if request.adapter is not None:
                    self._active[request.adapter] += 1
                request.turn.set_result(None)
                progress = True

    def _has_room(self, adapter: str) -> bool:
        return adapter in self._active or len(self._active) < self._adapters
