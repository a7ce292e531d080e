"""Fair semaphore of the engine: bounds concurrent samples and adapters; tenants take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Request:
    """`samples`: number of slots. `turn`: done when the request has its slots."""

    adapter: str | None
    samples: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SampleSlots:
    """Slots for samples; used in one event loop.

    Each tenant has two queues, for requests with and without an adapter; all queues take turns. A request without
    enough free slots blocks later requests, so that large requests do not starve. A request that would exceed the
    number of adapters blocks other requests with adapters only.
    """

    def __init__(self, samples: int, adapters: int) -> None:
        self._samples, self._adapters = samples, adapters
        self._free = samples
        self._active: Counter[str] = Counter()
        """Number of requests in the engine, by adapter."""
        self._queues: dict[tuple[str, bool], deque[_Request]] = {}
        """Queues in the order of their turns."""

    @asynccontextmanager
    async def take(self, tenant: str, adapter: str | None, samples: int) -> AsyncIterator[None]:
        """Reserve slots while the context is active; wait until they are free.

        Args:
            tenant: name of the tenant.
            adapter: name of the adapter; None: the base model.
            samples: number of samples; reserves at most all slots.
        """
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
                    self._active += Counter()  # removes zeros
            self._admit()  # also after a cancelled wait: later requests may fit

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
                self._queues[key] = self._queues.pop(key)  # moves the queue to the end
                self._free -= request.samples
                if request.adapter is not None:
                    self._active[request.adapter] += 1
                request.turn.set_result(None)
                progress = True

    def _has_room(self, adapter: str) -> bool:
        return adapter in self._active or len(self._active) < self._adapters
