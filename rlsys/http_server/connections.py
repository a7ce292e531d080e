"""Limits of the connections of an HTTP server, and of the time that a request may take.

A connection is waiting (for a request's head, or between two requests) or served. One that waits longer than
`head_seconds` is closed, and so is one whose body does not come in time. At `connections` at once, or when few file
descriptors are left, the one that has waited longest makes room for a new one, so that no client excludes others by
opening connections and saying nothing; when all are being served, the new one is refused. One whose client does not
take its answer also makes room, if that client has shown no token.

A client without a token gets nothing more on a connection after a refusal, and only `requests` answers before: else
the requests that it has sent in advance would use the event loop for as long as it likes.
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
    """Passes one record a second, so that no client can fill a disk with log lines."""

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
    "message": "as many clients are being served as this server takes",
    "type": "server_error",
    "code": 503,
}
_BODY = json.dumps({"error": _ERROR}).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


_ENGINE_OPEN_PATHS = ("/health", "/ready", "/metrics")
"""Starts of the paths that SGLang answers without a key (sglang/srt/utils/auth.py)."""


@dataclass(frozen=True)
class ServerLimits:
    """connections: clients at once. body_bytes: of a request. head_seconds: for the lines of a request up to its
    body, and for a part of an answer to be taken. body_seconds: for a body, and one more for each MiB of it.
    requests: on a connection, of a client without a token."""

    connections: int = 1024
    body_bytes: int = 2**20
    head_seconds: float = 30.0
    body_seconds: float = 10.0
    requests: int = 16

    def seconds_for(self, length: int | None) -> float:
        """Return the seconds for a body of `length` bytes; None is a length that was not announced."""
        size = self.body_bytes if length is None else min(length, self.body_bytes)
        return self.body_seconds + size / 2**20


class ConnectionLimiter:
    """Owns the connections of a server; belongs to one event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._max_connections = limits.connections
        """Fewer while descriptors are scarce."""
        self._waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """Waiting connections, the oldest first, and their timers."""
        self._requests_in_progress: set[asyncio.BaseTransport] = set()
        self._peers: dict[Any, asyncio.BaseTransport] = {}
        """Address of the client -> connection."""
        self._answers: dict[asyncio.BaseTransport, int] = {}
        """Connection -> answers to requests without a token."""
        self.counts = dict.fromkeys(("refused", "evicted", "late_heads", "late_bodies"), 0)
        """Connections since the start: refused because all were being served, closed to make room, closed because a
        head or a body did not come in time."""

    def protocol(self, make: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """Return a protocol factory for `loop.create_server`: the protocols of `make`, behind this limiter."""
        return lambda *args, **kwargs: _Gate(self, make(*args, **kwargs))

    def asgi(self, app: AsgiApp) -> AsgiApp:
        """The outermost application of a server whose protocol is behind this limiter."""

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
        """Return whether a new connection may stay; it then waits."""
        open_connections = len(self._waiting) + len(self._requests_in_progress)
        connection = transport.get_extra_info("socket")
        if connection is not None and not descriptors_left(connection.fileno()):
            self._max_connections = max(1, min(self._max_connections, open_connections))
        elif open_connections < self._max_connections // 2:
            self._max_connections = self.limits.connections
        if open_connections >= self._max_connections:
            idle = next((t for t in self._waiting if not _unread(t)), None)
            idle = idle or next((t for t in self._waiting if t in self._answers), None)
            if idle is None:
                self._count("refused")
                return False
            self._count("evicted")
            self._close(idle)
        self._wait(transport)
        if peer := transport.get_extra_info("peername"):
            self._peers[peer[:2]] = transport
        return True

    def begin(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that the head of a request has arrived."""
        if transport in self._waiting:
            self._waiting.pop(transport).cancel()
            self._requests_in_progress.add(transport)

    def end(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that a request is answered; the client may send another one."""
        if transport in self._requests_in_progress:
            self._requests_in_progress.discard(transport)
            self._wait(transport)

    def is_last(self, transport: asyncio.BaseTransport, status: int, *, authorized: bool) -> bool:
        """Count an answer that begins; return whether the connection has to end with it.

        Args:
            transport: The connection.
            status: Of the answer, in HTTP.
            authorized: Whether the request carries a token of this server.
        """
        if authorized:
            return False
        self._answers[transport] = self._answers.get(transport, 0) + 1
        return status >= 400 or self._answers[transport] >= self.limits.requests

    def late_body(self, transport: asyncio.BaseTransport | None) -> None:
        """Close a connection whose body has not arrived in time."""
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
        """An answer that is still being read, however slowly, is no waiting."""
        unsent_bytes = _unread(transport)
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


def _unread(transport: asyncio.BaseTransport) -> int:
    """Bytes of an answer that the client has not taken yet."""
    assert isinstance(transport, asyncio.WriteTransport)
    return transport.get_write_buffer_size()


class _Gate(asyncio.Protocol):
    """Passes everything on to the protocol behind it, if the limiter admits the connection."""

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
