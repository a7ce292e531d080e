"""Serve an aiohttp application. Every process of rlsys that listens for HTTP uses this module.

    app = guarded_app(routes, limits, error_json)
    async with serving(app, "127.0.0.1", 0) as url: ...

Connections, heads and bodies have limits (connections.py). An error of a handler becomes a response in the format of
the API. `serving` first raises the soft limit of file descriptors.
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
from aiohttp.typedefs import Middleware

from rlsys.core.descriptors import raise_soft_limit
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.texts import load_json, shorten
from rlsys.http_server.connections import ConnectionLimiter, OncePerSecond, ServerLimits

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorForm = Callable[[int, str], web.Response]
"""(status, message) -> response in the format of an API."""
Statuses = Mapping[type[Exception], int]
"""Exception -> HTTP status of the response."""

LIMITER = web.AppKey("limiter", ConnectionLimiter)
AUTHORIZED = web.RequestKey("authorized", bool)
"""Set for a request that has a token, or comes from the user of this process."""
BACKLOG = 1024
_ACCEPTS = 1
"""Number of connections that asyncio accepts before it calls the limiter (asyncio's parameter `backlog`)."""
_STATUSES: Statuses = {UserError: 400, RunError: 500, RlsysError: 500}

LONGEST_ERROR = 300
"""Largest length of a request's error in a log, in characters."""


def _shorten_error(record: logging.LogRecord) -> bool:
    """Shorten the record of a malformed request or a lost connection to one line without traceback. Return True."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | ConnectionError):
        message = shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_ERROR)
        record.msg, record.args, record.exc_info = "%s: %s", (record.getMessage(), message), None
    return True


log = logging.getLogger("rlsys.http_server.requests")
log.addFilter(OncePerSecond())
log.addFilter(_shorten_error)


class Refusal(Exception):
    """Raised for a request that is refused. `status`: the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_json(status: int, message: str) -> web.Response:
    """Return an error response with the body {"error": MESSAGE}."""
    return web.json_response({"error": message}, status=status)


def error_text(status: int, message: str) -> web.Response:
    """Return an error response whose body is the message."""
    return web.Response(status=status, text=message)


def guarded_app(
    routes: Iterable[web.AbstractRouteDef],
    limits: ServerLimits,
    form: ErrorForm = error_json,
    statuses: Statuses | None = None,
    admit: Callable[[web.Request], None] = lambda _: None,
    observe: Callable[[web.Request, int, float], None] = lambda *_: None,
) -> web.Application:
    """Create an application with limits, and with one format of error responses.

    Args:
        routes: routes of aiohttp.
        limits: limits of connections and bodies.
        form: creates an error response.
        statuses: exception -> HTTP status, in addition to UserError (400) and RunError (500). For a subclass, the
            status of the nearest base class applies.
        admit: raises Refusal if the client has no permission. It runs before the body is read. It sets AUTHORIZED for
            clients with a token; others get few responses on a connection, and none after a refusal.
        observe: called with each request, the status of its response, and its duration in seconds.
    """
    limiter = ConnectionLimiter(limits)
    middlewares = [
        _limit_middleware(limiter, observe),
        _error_middleware(limits, form, {**_STATUSES, **(statuses or {})}, admit),
    ]

    async def end_connection(request: web.Request, response: web.StreamResponse) -> None:
        authorized = request.get(AUTHORIZED, False)
        if request.transport is not None and limiter.is_last(
            request.transport, response.status, authorized=authorized
        ):
            response.force_close()
            response.headers["Connection"] = "close"

    app = web.Application(client_max_size=limits.body_bytes, middlewares=middlewares)
    app.on_response_prepare.append(end_connection)
    app[LIMITER] = limiter
    app.add_routes(routes)
    return app


def _limit_middleware(
    limiter: ConnectionLimiter, observe: Callable[[web.Request, int, float], None]
) -> Middleware:
    """Return the middleware that limits the time for a body, and tells the limiter when a request begins and ends."""

    @web.middleware
    async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
        timer = asyncio.get_running_loop().call_later(
            limiter.limits.seconds_for(request.content_length), _end_body, limiter, request
        )
        limiter.begin(request.transport)
        start = time.monotonic()
        try:
            response = await handler(request)
            observe(request, response.status, time.monotonic() - start)
            return response
        finally:
            timer.cancel()
            if request.content.exception() is not None:  # the rest of the body is not read
                request.content.feed_eof()
                request.protocol.close()
            limiter.end(request.transport)

    return limited


def _error_middleware(
    limits: ServerLimits, form: ErrorForm, statuses: Statuses, admit: Callable[[web.Request], None]
) -> Middleware:
    """Return the middleware that admits requests, and converts errors to responses. Arguments as of `guarded_app`."""

    @web.middleware
    async def convert_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            admit(request)
            encoding = request.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise Refusal(
                    415,
                    f"Content-Encoding: {encoding[:50]}: expected identity; compressed bodies are not supported",
                )
            return await handler(request)
        except Refusal as e:
            return form(e.status, str(e))
        except web.HTTPRequestEntityTooLarge:
            return form(413, f"the body is too large; expected at most {limits.body_bytes} bytes")
        except web.RequestPayloadError as e:
            return form(400, f"the body cannot be read: {' '.join(str(e).split())}")
        except web.HTTPException as e:
            if e.status < 400:
                raise
            has_text = e.text and e.text != f"{e.status}: {e.reason}"
            message = str(e.text) if has_text else f"{request.method} {request.path[:200]}: {e.reason}"
            return form(e.status, message)
        except tuple(statuses) as e:
            return form(next(statuses[kind] for kind in type(e).__mro__ if kind in statuses), str(e))

    return convert_errors


def _end_body(limiter: ConnectionLimiter, request: web.Request) -> None:
    """Give the reader of a body an error with status 408 if the body is incomplete at the end of its time."""
    if not request.content.is_eof():
        seconds = limiter.limits.seconds_for(request.content_length)
        limiter.late_body(None)
        request.content.set_exception(
            web.HTTPRequestTimeout(text=f"the body did not arrive within {seconds:.0f} s")
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
    """Listen while the context is active.

    Args:
        app: an application of `guarded_app`.
        host: address or host name; a Path: path of a Unix socket.
        port: the port; 0: a free port.
        field: name of the option or field of the port, for errors.
        shutdown_seconds: time that running requests may take when the context ends, in seconds.
        cancel_handlers: whether a handler is cancelled when its client disconnects.

    Yields:
        The URL http://HOST:PORT; for a Unix socket its path.

    Raises:
        UserError: the port is in use, or the host does not exist.
    """
    raise_soft_limit()
    runner = web.AppRunner(
        app,
        handler_cancellation=cancel_handlers,
        shutdown_timeout=shutdown_seconds,
        access_log=None,
        logger=log,
        auto_decompress=False,  # even an unread body of 1 MiB would block the event loop for seconds
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
    """Listen on a TCP port. Arguments and errors as of `serving`."""
    try:
        return await loop.create_server(protocol, host, port, backlog=_ACCEPTS, reuse_address=True)
    except UnicodeError:  # not a valid DNS name
        raise UserError(f"--host {host[:200]}: expected a host name or address") from None
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise UserError(f"{field} {port}: the port is in use on {host}; 0 selects a free one") from None
        raise UserError(f"--host {host[:200]} {field} {port}: {e.strerror or e}") from None


@contextmanager
def serving_in_thread(app: web.Application, host: str, port: int, field: str) -> Iterator[str]:
    """Listen in a thread while the context is active, for processes without an event loop.

    Args:
        app: an application of `guarded_app`.
        host: address or host name.
        port: the port; 0: a free port.
        field: name of the option or field of the port, for errors.

    Yields:
        The URL http://HOST:PORT.

    Raises:
        UserError: the port is in use, or the host does not exist.
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
    """Return the body as JSON.

    Args:
        request: the request.
        strict: whether to refuse NaN, Infinity and lone surrogates, which Python's json module generates.

    Raises:
        Refusal: the body is not JSON, or nested too deeply (400).
    """
    body = await request.read()
    try:
        return msgspec.json.decode(body) if strict else load_json(body)
    except ValueError as e:
        raise Refusal(400, f"the body is not JSON: {e}") from None
    except RecursionError:
        raise Refusal(
            400, "the body is nested too deeply; expected JSON that Python's parser accepts"
        ) from None


def user_of_client(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user id of the client of a TCP connection; None if it is unknown.

    It is known only for IPv4 connections within this machine, on Linux.

    Args:
        client: address and port of the client.
        server: address and port of the server.
    """

    def encode(address: tuple[str, int]) -> str:
        number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
        return f"{number:08X}:{address[1]:04X}"

    addresses = [encode(client), encode(server)]
    with contextlib.suppress(OSError, ValueError), Path("/proc/net/tcp").open() as table:
        for line in table:
            columns = line.split()
            if columns[1:3] == addresses:
                return int(columns[7])
    return None


async def check_same_user(request: web.Request) -> None:
    """Check that the client is a process of this user on this machine, and set AUTHORIZED.

    Raises:
        Refusal: the client is another one, or unknown (403).
    """
    assert request.transport is not None
    addresses = [request.transport.get_extra_info(name) for name in ("peername", "sockname")]
    if await asyncio.to_thread(user_of_client, *addresses) != os.geteuid():
        raise Refusal(403, f"{request.path[:200]}: only the user of this server may send this request")
    request[AUTHORIZED] = True


def bearer_token(request: web.Request) -> str:
    """Return the bearer token of the header Authorization; empty without one."""
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def api_key(request: web.Request) -> str:
    """Return the key of the header x-api-key, or else the bearer token of Authorization; empty without both."""
    return request.headers.get("x-api-key", "").strip() or bearer_token(request)


def same_secret(candidate: str, secret: str) -> bool:
    """Return whether two secrets are equal, in a time that does not depend on their common prefix."""
    return hmac.compare_digest(candidate.encode(errors="replace"), secret.encode())
