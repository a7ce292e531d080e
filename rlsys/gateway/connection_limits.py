"""Where clients come in: how many connections there may be, and how long one may take to say what it wants.

A connection is waiting (for a request's head, or between two requests) or served. One that waits longer than
`head_seconds` is closed. At `connections` at once the one that has waited longest makes room for a new one, so that
nobody keeps others out by opening connections and saying nothing; when all are being served, the new one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from rlsys.gateway.proxy import error_body

_WHY_FULL = error_body(503, "as many clients are being served as the router takes")
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_WHY_FULL), _WHY_FULL)
)


@dataclass(frozen=True)
class DoorLimits:
    """connections: clients at once. head_seconds: for the lines of a request up to its body, and for a part of an
    answer to be taken."""

    connections: int
    head_seconds: float = 30.0


class Door:
    """Owns the connections of a server; belongs to one event loop."""

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """In the order in which they began to wait."""
        self._served: set[asyncio.BaseTransport] = set()

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The outermost one of the application behind the door."""
        self.begin(request.transport)
        try:
            return await handler(request)
        finally:
            self.end(request.transport)

    def protocol(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """For `loop.create_server`: what `make` makes, behind this door."""
        return lambda: _Gate(self, make())

    def admit(self, transport: asyncio.BaseTransport) -> bool:
        """Whether a new connection may stay; it waits then."""
        if len(self._waiting) + len(self._served) >= self._limits.connections:
            idle = next((t for t in self._waiting if not _unread(t)), None)
            if idle is None:
                return False
            self._close(idle)
        self._wait(transport)
        return True

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """The head of a request has come."""
        if transport in self._waiting:
            self._waiting.pop(transport).cancel()
            self._served.add(transport)

    def end(self, transport: asyncio.BaseTransport | None) -> None:
        """The request is answered; the client may send another one."""
        if transport in self._served:
            self._served.discard(transport)
            self._wait(transport)

    def lost(self, transport: asyncio.BaseTransport) -> None:
        self._served.discard(transport)
        if timer := self._waiting.pop(transport, None):
            timer.cancel()

    def _wait(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.call_later(self._limits.head_seconds, self._expire, transport, -1)

    def _expire(self, transport: asyncio.BaseTransport, before: int) -> None:
        """An answer that is still being read, however slowly, is no waiting."""
        left = _unread(transport)
        if left and left != before:
            loop = asyncio.get_running_loop()
            again = loop.call_later(self._limits.head_seconds, self._expire, transport, left)
            self._waiting[transport] = again
        else:
            self._close(transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.lost(transport)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()


def _unread(transport: asyncio.BaseTransport) -> int:
    """Bytes of an answer that the client has not taken yet."""
    assert isinstance(transport, asyncio.WriteTransport)
    return transport.get_write_buffer_size()


class _Gate(asyncio.Protocol):
    """Passes everything on to the protocol behind it, if the door lets the connection in."""

    def __init__(self, door: Door, inner: asyncio.Protocol) -> None:
        self._door = door
        self._inner = inner
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._door.admit(transport):
            self._transport = transport
            self._inner.connection_made(transport)
        else:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._door.lost(self._transport)
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._inner.resume_writing()
