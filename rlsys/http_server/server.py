"""Serve an aiohttp application. Every process of rlsys that listens for HTTP uses this module.

    app = guarded_app(routes, limits, error_json)
    async with serving(app, "127.0.0.1", 0) as url: ...

Connections, heads and bodies have limits (connections.py). An error of a handler becomes an answer in the form of the
API. A server raises the soft limit of file descriptors first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlsys.core.descriptors import raise_soft_limit
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.texts import load_json, shorten
from rlsys.http_server.connections import ConnectionLimiter, OncePerSecond, ServerLimits

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorForm = Callable[[int, str], web.Response]
"""(status, message) -> the answer, in the form of an API."""
Statuses = Mapping[type[Exception], int]

LIMITER = web.AppKey("limiter", ConnectionLimiter)
AUTHORIZED = web.RequestKey("authorized", bool)
"""Set for a request that carries a token, or comes from this process' user."""
BACKLOG = 1024
_ACCEPTS = 1
"""Connections that asyncio accepts before it lets the limiter look at them: its name for this is backlog."""
_STATUSES: Statuses = {UserError: 400, RunError: 500, RlsysError: 500}

LONGEST_ERROR = 300
"""Characters of a request's error in a log."""


def _shorten_error(record: logging.LogRecord) -> bool:
    """Make one short line of a request that is no HTTP, or whose client is gone: else a log holds its bytes."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | ConnectionError):
        message = shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_ERROR)
        record.msg, record.args, record.exc_info = "%s: %s", (record.getMessage(), message), None
    return True


log = logging.getLogger("rlsys.http_server.requests")
log.addFilter(OncePerSecond())
log.addFilter(_shorten_error)


class Refusal(Exception):
    """A request that is not served. `status`: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_json(status: int, message: str) -> web.Response:
    """{"error": MESSAGE}"""
    return web.json_response({"error": message}, status=status)


def error_text(status: int, message: str) -> web.Response:
    """The message alone."""
    return web.Response(status=status, text=message)


def guarded_app(
    routes: Iterable[web.AbstractRouteDef],
    limits: ServerLimits,
    form: ErrorForm = error_json,
    statuses: Statuses | None = None,
    admit: Callable[[web.Request], None] = lambda _: None,
    observe: Callable[[web.Request, int, float], None] = lambda *_: None,
) -> web.Application:
    """Make an application whose errors are answered in one form.

    Args:
        routes: of aiohttp.
        limits: of its connections and bodies.
        form: makes the answer to an error.
        statuses: HTTP status of exceptions beside UserError (400) and RunError (500); the nearest class counts.
        admit: raises Refusal for a request of somebody who may not ask. It runs before any of the body is read. It
            sets AUTHORIZED for who has a token: others get few answers on a connection, and none after a refusal.
        observe: is given each request, the status of its answer, and the seconds until its end.
    """
    limiter = ConnectionLimiter(limits)
    all_statuses = {**_STATUSES, **(statuses or {})}

    @web.middleware
    async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
        timer = asyncio.get_running_loop().call_later(
            limits.seconds_for(request.content_length), _end_body, limiter, request
        )
        limiter.begin(request.transport)
        start = time.monotonic()
        try:
            response = await handler(request)
            observe(request, response.status, time.monotonic() - start)
            return response
        finally:
            timer.cancel()
            if request.content.exception() is not None:  # the rest is not read
                request.content.feed_eof()
                request.protocol.close()
            limiter.end(request.transport)

    @web.middleware
    async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            admit(request)
            if request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise Refusal(415, "Content-Encoding: this server reads no compressed bodies")
            return await handler(request)
        except Refusal as e:
            return form(e.status, str(e))
        except web.HTTPRequestEntityTooLarge:
            return form(413, f"the body is larger than {limits.body_bytes} bytes")
        except web.RequestPayloadError as e:
            return form(400, f"the body cannot be read: {' '.join(str(e).split())}")
        except web.HTTPException as e:
            if e.status < 400:
                raise
            has_text = e.text and e.text != f"{e.status}: {e.reason}"
            message = str(e.text) if has_text else f"{request.method} {request.path[:200]}: {e.reason}"
            return form(e.status, message)
        except tuple(all_statuses) as e:
            return form(next(all_statuses[kind] for kind in type(e).__mro__ if kind in all_statuses), str(e))

    async def end_connection(request: web.Request, response: web.StreamResponse) -> None:
        authorized = request.get(AUTHORIZED, False)
        if request.transport is not None and limiter.is_last(
            request.transport, response.status, authorized=authorized
        ):
            response.force_close()
            response.headers["Connection"] = "close"

    app = web.Application(client_max_size=limits.body_bytes, middlewares=[limited, error_middleware])
    app.on_response_prepare.append(end_connection)
    app[LIMITER] = limiter
    app.add_routes(routes)
    return app


def _end_body(limiter: ConnectionLimiter, request: web.Request) -> None:
    """The time for a body is up: who reads it gets 408."""
    if not request.content.is_eof():
        seconds = limiter.limits.seconds_for(request.content_length)
        limiter.late_body(None)
        request.content.set_exception(
            web.HTTPRequestTimeout(text=f"the body did not come within {seconds:.0f} s")
        )


@asynccontextmanager
async def serving(
    app: web.Application,
    host: str | Path,
    port: int = 0,
    *,
    field: str = "--port",
    shutdown_seconds: float = 0.0,
    cancel_handlers: bool = False,
) -> AsyncIterator[str]:
    """Listen until the block ends.

    Args:
        app: of `guarded_app`.
        host: an address or a name; a path: a Unix socket there.
        port: 0 takes a free one.
        field: what says the port, for messages.
        shutdown_seconds: how long requests under way may take at the end.
        cancel_handlers: a handler is cancelled when its client is gone.

    Returns: the address, `http://HOST:PORT`; of a Unix socket its path.

    Raises:
        UserError: the port is in use, or there is no such host.
    """
    raise_soft_limit()
    runner = web.AppRunner(
        app,
        handler_cancellation=cancel_handlers,
        shutdown_timeout=shutdown_seconds,
        access_log=None,
        logger=log,
        auto_decompress=False,  # also for an unread body: 1 MiB would keep the event loop busy for seconds
    )
    await runner.setup()
    server = None
    try:
        assert runner.server is not None
        loop, protocol = asyncio.get_running_loop(), app[LIMITER].protocol(runner.server)
        if isinstance(host, Path):
            server = await loop.create_unix_server(protocol, host, backlog=_ACCEPTS)
            address = str(host)
        else:
            server = await _listen(loop, protocol, host, port, field)
            url_host = f"[{host}]" if ":" in host else host
            address = f"http://{url_host}:{server.sockets[0].getsockname()[1]}"
        for listening in server.sockets:
            with listening.dup() as duplicate:
                duplicate.listen(BACKLOG)
        yield address
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()


async def _listen(
    loop: asyncio.AbstractEventLoop,
    protocol: Callable[..., asyncio.Protocol],
    host: str,
    port: int,
    field: str,
) -> asyncio.Server:
    try:
        return await loop.create_server(protocol, host, port, backlog=_ACCEPTS, reuse_address=True)
    except UnicodeError:  # of a name that DNS cannot have
        raise UserError(f"--host {host[:200]}: not a host name or address") from None
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise UserError(f"{field} {port}: in use on {host}; 0 finds a free one") from None
        raise UserError(f"--host {host[:200]} {field} {port}: {e.strerror or e}") from None


@contextmanager
def serving_in_thread(app: web.Application, host: str, port: int, field: str) -> Iterator[str]:
    """Serve in a thread, for processes without an event loop.

    Raises:
        UserError: The server cannot listen there.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="http", daemon=True)
    thread.start()
    listening = serving(app, host, port, field=field)
    try:
        url = asyncio.run_coroutine_threadsafe(listening.__aenter__(), loop).result()
        try:
            yield url
        finally:
            asyncio.run_coroutine_threadsafe(listening.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def read_json(request: web.Request, *, strict: bool = True) -> Any:
    """The body as JSON. Raises Refusal (400) for anything else, and for what is nested deeper than Python's stack.

    Args:
        strict: refuse NaN, Infinity and lone surrogates, which Python's json writes.
    """
    body = await request.read()
    try:
        return msgspec.json.decode(body) if strict else load_json(body)
    except ValueError as e:
        raise Refusal(400, f"the body is no JSON: {e}") from None
    except RecursionError:
        raise Refusal(400, "the body is no JSON: it is nested too deeply") from None


def user_of_client(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The id of the user who owns the other end of a TCP connection over IPv4 within this machine, as the kernel
    says; None: it does not say.

    Args:
        client: address and port from which the connection comes.
        server: address and port to which it goes.
    """

    def coded(address: tuple[str, int]) -> str:
        number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
        return f"{number:08X}:{address[1]:04X}"

    ends = coded(client), coded(server)
    with contextlib.suppress(OSError, ValueError), Path("/proc/net/tcp").open() as table:
        for line in table:
            _, local, remote, _, _, _, _, user, *_ = [*line.split(), *[""] * 8]
            if (local, remote) == ends:
                return int(user)
    return None


async def check_same_user(request: web.Request) -> None:
    """Raises Refusal (403) for a client on this machine of another user than this process'."""
    assert request.transport is not None
    ends = [request.transport.get_extra_info(name) for name in ("peername", "sockname")]
    if await asyncio.to_thread(user_of_client, *ends) != os.geteuid():
        raise Refusal(403, f"{request.path[:200]}: for the user of this server only")
    request[AUTHORIZED] = True


def bearer_token(request: web.Request) -> str:
    """Return the bearer token of the header Authorization, or an empty string."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def api_key(request: web.Request) -> str:
    """Return the key from either header in which stock clients send it, or an empty string."""
    return request.headers.get("x-api-key", "").strip() or bearer_token(request)


def same_secret(candidate: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(candidate.encode(errors="replace"), secret.encode())
