"""SampleSlots: limits the engine's concurrent samples and adapters. Tenants take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Request:
    """A request for slots.

    Attributes:
        adapter: name of the adapter; None: the base model.
        samples: number of slots.
        turn: future that is done when the request has its slots.
    """

    adapter: str | None
    samples: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SampleSlots:
    """Slots for samples in the engine. Used in one event loop.

    Each tenant has two queues, for requests with and without an adapter. All queues take turns. A request for more
    slots than are free blocks all later requests, so that large requests do not starve. A request that would exceed
    the number of adapters blocks only other requests with adapters.
    """

    def __init__(self, slots: int, max_adapters: int) -> None:
        """Create the slots.

        Args:
            slots: number of slots.
            max_adapters: largest number of different adapters in the engine at once.
        """
        self._slots, self._max_adapters = slots, max_adapters
        self._free = slots
        self._active: Counter[str] = Counter()
        """Name of an adapter -> number of its requests in the engine."""
        self._queues: dict[tuple[str, bool], deque[_Request]] = {}
        """(tenant, whether the requests have an adapter) -> queue, in the order of their turns."""

    @asynccontextmanager
    async def take(self, tenant: str, adapter: str | None, samples: int) -> AsyncIterator[None]:
        """Wait for slots, and reserve them while the context is active.

        Args:
            tenant: name of the tenant.
            adapter: name of the adapter; None: the base model.
            samples: number of samples. If it is larger than the number of slots, all slots are reserved.
        """
        request = _Request(adapter, min(samples, self._slots))
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
            self._admit()  # also after a cancelled wait, because later requests may fit

    def _admit(self) -> None:
        """Give slots to the first requests of the queues, in turns, while they fit."""
        adapters_blocked, progress = False, True
        while progress:
            progress = False
            for key, queue in list(self._queues.items()):
                while queue and queue[0].turn.cancelled():
                    queue.popleft()
                if not queue:
                    del self._queues[key]
                    continue
                request = queue[0]
                if request.adapter is not None and not self._fits(request.adapter):
                    adapters_blocked = True
                if adapters_blocked and request.adapter is not None:
                    continue
                if request.samples > self._free:
                    return
                queue.popleft()
                self._queues[key] = self._queues.pop(key)  # moves the queue to the end
                self._start(request)
                progress = True

    def _start(self, request: _Request) -> None:
        """Give a request its slots."""
        self._free -= request.samples
        if request.adapter is not None:
            self._active[request.adapter] += 1
        request.turn.set_result(None)

    def _fits(self, adapter: str) -> bool:
        """Return whether the engine can get a request with this adapter."""
        return adapter in self._active or len(self._active) < self._max_adapters
