"""ConnectionLimiter: limits the connections of an HTTP server and the time in which a request must arrive.

A connection is either waiting (for the head of its first or next request) or served.

event                                                       effect
a connection waits longer than `head_seconds`               the connection is closed
a body does not arrive in time                              the connection is closed
a new connection exceeds the limit `connections`, or few    the oldest waiting connection is closed, so that no client
file descriptors are left                                   can exclude others with idle connections
the same, but no waiting connection can be closed           the new connection is refused with status 503
a client without a token got `requests` responses on a      the connection is closed, because pipelined requests could
connection, or was refused                                  occupy the event loop for an unlimited time

A waiting connection whose client does not read its last response is only closed for a new one if the client has sent
no token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from rlsys.core.descriptors import descriptors_left

Scope = MutableMapping[str, Any]
AsgiApp = Callable[
    [Scope, Callable[[], Awaitable[Scope]], Callable[[Scope], Awaitable[None]]], Awaitable[None]
]

log = logging.getLogger("rlsys.http_server")


class OncePerSecond(logging.Filter):
    """Passes one log record per second, so that no client can fill a disk with log lines."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        current_time = time.monotonic()
        passes = current_time >= self._next
        if passes:
            self._next = current_time + 1
        return passes


log.addFilter(OncePerSecond())

_ERROR = {
    "message": "the server has reached its limit of connections; try again later",
    "type": "server_error",
    "code": 503,
}
_BODY = json.dumps({"error": _ERROR}).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


_ENGINE_OPEN_PATHS = ("/health", "/ready", "/metrics")
"""Prefixes of the paths for which SGLang requires no key (sglang/srt/utils/auth.py)."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of an HTTP server.

    Args:
        connections: largest number of connections.
        body_bytes: largest size of a request's body, in bytes.
        head_seconds: time limit for the head of a request, and for reading a part of a response, in seconds.
        body_seconds: time limit for a body, in seconds, in addition to one second per MiB.
        requests: largest number of requests on a connection of a client without a token.
    """

    connections: int = 1024
    body_bytes: int = 2**20
    head_seconds: float = 30.0
    body_seconds: float = 10.0
    requests: int = 16

    def seconds_for(self, length: int | None) -> float:
        """Return the time limit in seconds for a body of `length` bytes; None: unknown length."""
        size = self.body_bytes if length is None else min(length, self.body_bytes)
        return self.body_seconds + size / 2**20


class ConnectionLimiter:
    """Limits the connections of a server. Owns the connections. Used in one event loop.

    Attributes:
        counts: numbers of connections since the start:
            refused: refused because all connections were being served,
            evicted: closed for a new connection,
            late_heads: closed because the head of a request did not arrive in time,
            late_bodies: closed because a body did not arrive in time.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._max_connections = limits.connections
        """Current limit, which is lower while file descriptors are scarce."""
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """Waiting connection -> its timer, in the order in which they began to wait."""
        self._requests_in_progress: set[asyncio.BaseTransport] = set()
        self._peers: dict[Any, asyncio.BaseTransport] = {}
        """Address and port of a client -> its connection."""
        self._answers: dict[asyncio.BaseTransport, int] = {}
        """Connection -> number of responses to requests without a token."""
        self.counts = dict.fromkeys(("refused", "evicted", "late_heads", "late_bodies"), 0)

    def protocol(self, make: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """Return a protocol factory for `loop.create_server`, which limits the connections of protocols of `make`."""
        return lambda *args, **kwargs: _LimitedProtocol(self, make(*args, **kwargs))

    def asgi(self, app: AsgiApp) -> AsgiApp:
        """Return an ASGI application that applies the limits of this limiter to `app`."""

        async def limited(scope: Scope, receive: Any, send: Any) -> None:
            transport = self._peers.get(tuple(scope.get("client") or ()))
            if transport is None or scope["type"] != "http":
                await app(scope, receive, send)
            else:
                await self._run_limited(app, transport, scope, receive, send)

        return limited

    async def _run_limited(
        self, app: AsgiApp, transport: asyncio.BaseTransport, scope: Scope, receive: Any, send: Any
    ) -> None:
        """Run an ASGI request with a time limit for its body, and close the connection after its last response."""
        headers = dict(scope.get("headers") or ())
        is_complete = False

        async def receive_body() -> Scope:
            nonlocal is_complete
            message: Scope = await receive()
            is_complete = not message.get("more_body", False)
            return message

        async def send_counted(message: Scope) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                requires_key = not scope["path"].startswith(_ENGINE_OPEN_PATHS)
                authorized = requires_key and b"authorization" in headers and status not in (401, 403)
                if self.is_last(transport, status, authorized=authorized):
                    closing = (b"connection", b"close")
                    message = {**message, "headers": [*message.get("headers", ()), closing]}
            await send(message)

        length = headers.get(b"content-length", b"")
        seconds = self.limits.seconds_for(int(length) if length.isdigit() else None)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, lambda: None if is_complete else self.late_body(transport))
        self.begin(transport)
        try:
            await app(scope, receive_body, send_counted)
        finally:
            timer.cancel()
            self.end(transport)

    def admit(self, transport: asyncio.BaseTransport) -> bool:
        """Accept a new connection as waiting, or refuse it. Return whether it was accepted."""
        open_connections = len(self._waiting) + len(self._requests_in_progress)
        self._adapt_limit(transport, open_connections)
        if open_connections >= self._max_connections and not self._evict_idle():
            self._count("refused")
            return False
        self._wait(transport)
        if peer := transport.get_extra_info("peername"):
            self._peers[peer[:2]] = transport
        return True

    def _adapt_limit(self, transport: asyncio.BaseTransport, open_connections: int) -> None:
        """Adapt the current limit to the file descriptors that are left.

        While they are scarce, the limit is the number of open connections. It is restored when less than half of this
        number is open.
        """
        connection = transport.get_extra_info("socket")
        if connection is not None and not descriptors_left(connection.fileno()):
            self._max_connections = max(1, min(self._max_connections, open_connections))
        elif open_connections < self._max_connections // 2:
            self._max_connections = self.limits.connections

    def _evict_idle(self) -> bool:
        """Close the oldest waiting connection, and return whether there was one.

        A connection with unsent bytes is only closed if there is no other one, and if the client has sent no token.
        """
        transport = next((t for t in self._waiting if not _unsent_bytes(t)), None)
        transport = transport or next((t for t in self._waiting if t in self._answers), None)
        if transport is None:
            return False
        self._count("evicted")
        self._close(transport)
        return True

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that the head of a request has arrived."""
        if transport in self._waiting:
            self._waiting.pop(transport).cancel()
            self._requests_in_progress.add(transport)

    def end(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that a request was answered, so that the connection waits for the next one."""
        if transport in self._requests_in_progress:
            self._requests_in_progress.discard(transport)
            self._wait(transport)

    def is_last(self, transport: asyncio.BaseTransport, status: int, *, authorized: bool) -> bool:
        """Count a response, and return whether the connection must be closed after it.

        Args:
            transport: the connection.
            status: HTTP status of the response.
            authorized: whether the request has a token of this server.
        """
        if authorized:
            return False
        self._answers[transport] = self._answers.get(transport, 0) + 1
        return status >= 400 or self._answers[transport] >= self.limits.requests

    def late_body(self, transport: asyncio.BaseTransport | None) -> None:
        """Count a body that did not arrive in time, and close its connection. `transport` None: close none."""
        self._count("late_bodies")
        if transport is not None:
            self._close(transport)

    def on_connection_lost(self, transport: asyncio.BaseTransport) -> None:
        """Remove a closed connection."""
        self._requests_in_progress.discard(transport)
        self._answers.pop(transport, None)
        if timer := self._waiting.pop(transport, None):
            timer.cancel()
        peer = transport.get_extra_info("peername")
        if peer and self._peers.get(peer[:2]) is transport:
            del self._peers[peer[:2]]

    def _wait(self, transport: asyncio.BaseTransport) -> None:
        """Let a connection wait for the head of a request, with a time limit."""
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.call_later(self.limits.head_seconds, self._expire, transport, -1)

    def _expire(self, transport: asyncio.BaseTransport, previous_bytes: int) -> None:
        """Close a connection that has waited too long, unless its client is still reading a response.

        Args:
            transport: the connection.
            previous_bytes: number of unsent bytes at the previous call; -1: first call.
        """
        unsent_bytes = _unsent_bytes(transport)
        if unsent_bytes and unsent_bytes != previous_bytes:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self.limits.head_seconds, self._expire, transport, unsent_bytes)
            self._waiting[transport] = timer
        else:
            self._count("late_heads")
            self._close(transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.on_connection_lost(transport)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()

    def _count(self, event: str) -> None:
        self.counts[event] += 1
        log.warning("connections since the start: %s", self.counts)


def _unsent_bytes(transport: asyncio.BaseTransport) -> int:
    """Return the number of bytes of a response that the client has not read yet."""
    assert isinstance(transport, asyncio.WriteTransport)
    return transport.get_write_buffer_size()


class _LimitedProtocol(asyncio.Protocol):
    """Forwards all events to the protocol `inner` if the limiter accepts the connection."""

    def __init__(self, limiter: ConnectionLimiter, inner: asyncio.Protocol) -> None:
        self._limiter = limiter
        self._inner = inner
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._limiter.admit(transport):
            self._transport = transport
            self._inner.connection_made(transport)
        else:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._limiter.on_connection_lost(self._transport)
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
