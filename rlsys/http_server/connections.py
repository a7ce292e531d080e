"""ConnectionLimiter: limits the connections of an HTTP server and the time that a request may take.

A connection is waiting (for a request's head, or between two requests) or served. A connection that waits longer than
`head_seconds`, or whose body does not arrive in time, is closed. If there are `connections` connections, or few file
descriptors are left, the connection that has waited longest is closed for a new one, so that no client can exclude
others with idle connections. If all connections are being served, the new one is refused. A connection whose client
does not read its response may also be closed for a new one, if the client has sent no token.
A client without a token gets at most `requests` responses on a connection, and none after a refusal. Otherwise
pipelined requests could occupy the event loop for an unlimited time.
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
        head_seconds: time limit for the head of a request, and for reading a part of a response.
        body_seconds: time limit for a body, plus one second per MiB of it.
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
    """Limits the connections of a server, which it owns. Belongs to one event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._max_connections = limits.connections
        """Current limit; it is lower while file descriptors are scarce."""
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """Waiting connection -> its timer, the oldest first."""
        self._requests_in_progress: set[asyncio.BaseTransport] = set()
        self._peers: dict[Any, asyncio.BaseTransport] = {}
        """Address of the client -> connection."""
        self._answers: dict[asyncio.BaseTransport, int] = {}
        """Connection -> number of responses to requests without a token."""
        self.counts = dict.fromkeys(("refused", "evicted", "late_heads", "late_bodies"), 0)
        """Connections since the start: refused because all were being served, closed for a new one, closed because a
        head or a body did not arrive in time."""

    def protocol(self, make: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """Return a protocol factory for `loop.create_server`: protocols of `make` with this limiter."""
        return lambda *args, **kwargs: _Gate(self, make(*args, **kwargs))

    def asgi(self, app: AsgiApp) -> AsgiApp:
        """Return an ASGI application that applies the limits of this limiter to `app`."""

        async def limited(scope: Scope, receive: Any, send: Any) -> None:
            transport = self._peers.get(tuple(scope.get("client") or ()))
            headers = dict(scope.get("headers") or ())
            length, complete = headers.get(b"content-length", b""), False

            async def send_counted(message: Scope) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    needs_key = not scope["path"].startswith(_ENGINE_OPEN_PATHS)
                    authorized = needs_key and b"authorization" in headers and status not in (401, 403)
                    if transport is not None and self.is_last(transport, status, authorized=authorized):
                        closing = (b"connection", b"close")
                        message = {**message, "headers": [*message.get("headers", ()), closing]}
                await send(message)

            async def received() -> Scope:
                nonlocal complete
                message: Scope = await receive()
                complete = not message.get("more_body", False)
                return message

            if transport is None or scope["type"] != "http":
                await app(scope, receive, send)
                return
            seconds = self.limits.seconds_for(int(length) if length.isdigit() else None)
            loop = asyncio.get_running_loop()
            timer = loop.call_later(seconds, lambda: None if complete else self.late_body(transport))
            self.begin(transport)
            try:
                await app(scope, received, send_counted)
            finally:
                timer.cancel()
                self.end(transport)

        return limited

    def admit(self, transport: asyncio.BaseTransport) -> bool:
        """Return whether a new connection is accepted. It then counts as waiting."""
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
        """Lower the limit to the open connections while file descriptors are scarce; restore it at half of it."""
        connection = transport.get_extra_info("socket")
        if connection is not None and not descriptors_left(connection.fileno()):
            self._max_connections = max(1, min(self._max_connections, open_connections))
        elif open_connections < self._max_connections // 2:
            self._max_connections = self.limits.connections

    def _evict_idle(self) -> bool:
        """Close an idle connection, and return whether there was one.

        This is the oldest waiting connection without unsent bytes, or else the oldest that got a response without a
        token.
        """
        idle = next((t for t in self._waiting if not _unsent_bytes(t)), None)
        idle = idle or next((t for t in self._waiting if t in self._answers), None)
        if idle is None:
            return False
        self._count("evicted")
        self._close(idle)
        return True

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that the head of a request has arrived."""
        if transport in self._waiting:
            self._waiting.pop(transport).cancel()
            self._requests_in_progress.add(transport)

    def end(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that a request was answered. The client may send another one."""
        if transport in self._requests_in_progress:
            self._requests_in_progress.discard(transport)
            self._wait(transport)

    def is_last(self, transport: asyncio.BaseTransport, status: int, *, authorized: bool) -> bool:
        """Count a response, and return whether the connection must be closed after it.

        Args:
            transport: The connection.
            status: HTTP status of the response.
            authorized: Whether the request has a token of this server.
        """
        if authorized:
            return False
        self._answers[transport] = self._answers.get(transport, 0) + 1
        return status >= 400 or self._answers[transport] >= self.limits.requests

    def late_body(self, transport: asyncio.BaseTransport | None) -> None:
        """Count a body that did not arrive in time, and close the connection, if there is one."""
        self._count("late_bodies")
        if transport is not None:
            self._close(transport)

    def on_connection_lost(self, transport: asyncio.BaseTransport) -> None:
        self._requests_in_progress.discard(transport)
        self._answers.pop(transport, None)
        if timer := self._waiting.pop(transport, None):
            timer.cancel()
        peer = transport.get_extra_info("peername")
        if peer and self._peers.get(peer[:2]) is transport:
            del self._peers[peer[:2]]

    def _wait(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.call_later(self.limits.head_seconds, self._expire, transport, -1)

    def _expire(self, transport: asyncio.BaseTransport, previous_bytes: int) -> None:
        """Close a connection that has waited too long, unless its client is still reading a response."""
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


class _Gate(asyncio.Protocol):
    """Forwards all events to an inner protocol if the limiter accepts the connection."""

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
