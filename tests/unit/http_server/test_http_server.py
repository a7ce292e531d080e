"""Connections that say nothing, heads and bodies that do not come, errors, tokens, and answers of others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rlsys.core.errors import RunError, UserError
from rlsys.engine.hooks.sockets import limit_connections
from rlsys.http_server.clients import RedirectRefused, TooLong, direct_session, read_bounded
from rlsys.http_server.connections import ConnectionLimiter, ServerLimits
from rlsys.http_server.server import (
    LIMITER,
    Refusal,
    bearer_token,
    guarded_app,
    read_json,
    same_secret,
    serving,
)

HEAD = b"POST /body HTTP/1.1\r\nHost: x\r\n"


@asynccontextmanager
async def server(limits: ServerLimits) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Port of a server whose /slow answers when the event is set."""
    free = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await free.wait()
        return web.Response(text="at last")

    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="here")

    async def body(request: web.Request) -> web.Response:
        return web.json_response(await read_json(request))

    routes = [web.get("/slow", slow), web.get("/quick", quick), web.post("/body", body)]
    async with serving(guarded_app(routes, limits), "127.0.0.1") as url:
        yield int(url.rpartition(":")[2]), free


async def ask(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that came before the connection was closed or reset."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_silent_connections_do_not_block_other_clients() -> None:
    """Before: 260 of them, without a token, shut out everybody for as long as they liked."""
    async with server(ServerLimits(connections=4, head_seconds=3600)) as (port, free):
        silent = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"X-A: ")
            silent.append((reader, writer))
        for _ in range(3):
            reader, writer = await ask(port, "/quick")
            assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
            writer.close()
        assert await ended(silent[0][0]) == b"", "the one that waited longest made room"
        free.set()


async def test_a_client_being_served_is_not_evicted() -> None:
    async with server(ServerLimits(connections=2, head_seconds=3600)) as (port, free):
        served = [await ask(port, "/slow") for _ in range(2)]
        while True:  # until both have begun
            reader, writer = await ask(port, "/quick")
            if b" 503 " in await reader.readline():
                head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
                break
            writer.close()
        assert b"Retry-After: 1" in head
        assert b"Content-Length: %d" % len(body) in head
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == (503, "server_error")
        assert "limit of connections" in error["message"]
        free.set()
        for reader, writer in served:
            assert (await reader.readuntil(b"at last")).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_a_head_has_a_deadline_and_an_answer_on_its_way_has_none() -> None:
    async with server(ServerLimits(connections=9, head_seconds=0.1)) as (port, free):
        slow = await ask(port, "/slow")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        assert await ended(reader) == b""
        free.set()
        assert (await slow[0].readuntil(b"at last")).startswith(b"HTTP/1.1 200")
        assert await ended(slow[0]) == b"", "and then it waits for another request, not for ever"


async def test_a_missing_body_gets_a_408_and_the_connection_is_closed() -> None:
    limits = ServerLimits(connections=9, body_seconds=0.1, body_bytes=2**16)
    async with server(limits) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
        head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
        assert b" 408 " in head.splitlines()[0]
        assert json.loads(body) == {"error": "the body did not arrive within 0 s"}
        assert b'{"a": 1}' in await _post(port, b'{"a": 1}')


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[" * 60_000, 400), (b'{"a": NaN}', 400), (b"\xff", 400), (b"1" * 70_000, 413)],
    ids=["nested", "NaN", "no UTF-8", "too large"],
)
async def test_bodies_that_are_not_json_get_an_error_message(body: bytes, status: int) -> None:
    async with server(ServerLimits(connections=9, body_bytes=2**16)) as (port, _):
        answer = await _post(port, body)
        assert b" %d " % status in answer.splitlines()[0]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"].startswith("the body is ")


async def _post(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return await ended(reader)


async def test_errors_become_answers_and_every_request_is_observed() -> None:
    class Busy(RunError): ...

    async def fail(request: web.Request) -> web.Response:
        raise {"user": UserError, "run": RunError, "busy": Busy}[request.query["kind"]]("why")

    def admit(request: web.Request) -> None:
        if not same_secret(bearer_token(request), "secret"):
            raise Refusal(401, "no token")

    observations: list[tuple[str, int]] = []
    app = guarded_app(
        [web.get("/", fail)], ServerLimits(), statuses={Busy: 503}, admit=admit,
        observe=lambda request, status, _: observations.append((request.path, status)),
    )  # fmt: skip
    right = {"Authorization": "bearer secret"}
    async with serving(app, "127.0.0.1") as url, direct_session() as session:

        async def ask(path: str, headers: dict[str, str]) -> tuple[int, Any]:
            async with session.get(url + path, headers=headers) as answer:
                return answer.status, (await answer.json())["error"]

        assert await ask("/?kind=user", right) == (400, "why")
        assert await ask("/?kind=run", right) == (500, "why")
        assert await ask("/?kind=busy", right) == (503, "why")
        assert await ask("/other", right) == (404, "GET /other: Not Found")
        for wrong in ({}, {"Authorization": "Bearer \udcff"}, {"Authorization": "Basic secret"}):
            assert await ask("/?kind=user", wrong) == (401, "no token")
    assert observations == [("/", 400), ("/", 500), ("/", 503), ("/other", 404), *[("/", 401)] * 3]


async def test_limit_violations_are_counted_and_logged_at_most_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = guarded_app([], ServerLimits(connections=1, head_seconds=3600))
    async with serving(app, "127.0.0.1") as url:
        port = int(url.rpartition(":")[2])
        writers = [(await asyncio.open_connection("127.0.0.1", port)) for _ in range(20)]
        for reader, _ in writers[:-1]:
            assert await ended(reader) == b""
        assert app[LIMITER].counts == {"refused": 0, "evicted": 19, "late_heads": 0, "late_bodies": 0}
        writers[-1][1].write(b"no HTTP\r\n\r\n")
        assert b" 400 " in (await ended(writers[-1][0])).splitlines()[0]
    assert len([r for r in caplog.records if r.name == "rlsys.http_server"]) <= 2


async def test_a_client_follows_no_redirect_and_reads_no_endless_answer() -> None:
    visits: list[str] = []

    async def moved(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/there")

    async def there(_: web.Request) -> web.Response:
        visits.append("there")
        return web.Response(body=b"x" * 100_000)

    app = guarded_app([web.get("/", moved), web.get("/there", there)], ServerLimits())
    async with serving(app, "127.0.0.1") as url, direct_session() as session:
        with pytest.raises(RedirectRefused, match=r"redirects to /there; expected the final URL"):
            await session.get(url)
        assert not visits
        async with session.get(url, allow_redirects=False) as answer:
            assert answer.status == 307
        async with session.get(f"{url}/there") as answer:
            with pytest.raises(TooLong, match="the response has more than 99999 bytes"):
                await read_bounded(answer, 99_999)
        async with session.get(f"{url}/there") as answer:
            assert len(await read_bounded(answer, 100_000)) == 100_000


async def test_a_port_in_use_is_a_user_error() -> None:
    app = guarded_app([], ServerLimits())
    async with serving(app, "127.0.0.1") as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(
            UserError, match=rf"^--port {port}: the port is in use on 127.0.0.1; 0 selects a free one$"
        ):
            async with serving(guarded_app([], ServerLimits()), "127.0.0.1", port):
                pass


async def test_the_limiter_reports_client_disconnects_to_the_server_behind_it() -> None:
    """Else its handler would work on for a client that is gone."""
    events: list[str] = []

    class Inner(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            events.append("made")

        def connection_lost(self, error: Exception | None) -> None:
            events.append("lost")

    gate = ConnectionLimiter(ServerLimits(connections=1)).protocol(Inner)()
    gate.connection_made(asyncio.Transport())
    gate.connection_lost(None)
    assert events == ["made", "lost"]


# -- servers of others, SGLang's for one ---------------------------------------------------------------------


@asynccontextmanager
async def uvicorn_server(limits: ServerLimits, status: int = 200) -> AsyncIterator[int]:
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"here"})

    config = uvicorn.Config(app, lifespan="off", log_level="critical")
    limit_connections(config, limits)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    serving_it = asyncio.create_task(server.serve([listening]))
    try:
        while not server.started:
            await asyncio.sleep(0)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await serving_it


async def test_silent_connections_to_an_engine_do_not_block_other_clients() -> None:
    async with uvicorn_server(ServerLimits(connections=4, head_seconds=3600)) as port:
        silent = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"X-A: ")
            silent.append((reader, writer))
        for _ in range(3):
            reader, writer = await ask(port, "/")
            assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
            writer.close()
        assert await ended(silent[0][0]) == b""


async def test_an_engines_heads_and_bodies_have_their_time() -> None:
    async with uvicorn_server(ServerLimits(connections=4, head_seconds=0.1, body_seconds=0.1)) as port:
        for partial_request in (HEAD, HEAD + b"Content-Length: 100\r\n\r\n{"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(partial_request)
            assert await ended(reader) == b""
        assert b"200 OK" in await _post(port, b"{}")


async def test_security_h6_an_engine_stops_after_refusal_and_limits_keyless_requests() -> None:
    for status, most in ((401, 1), (404, 1), (200, 16)):
        async with uvicorn_server(ServerLimits(), status) as port:
            for headers, count in (
                (b"", most),
                (b"Authorization: Bearer key\r\n", 1 if status == 401 else 100),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                raw = b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % headers
                writer.write(raw * 99 + raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                assert (await ended(reader)).count(b"HTTP/1.1") == count, (status, headers)
                writer.close()


@pytest.mark.parametrize("path", [b"/health", b"/health_generate", b"/ready", b"/metrics"])
async def test_security_h6_a_header_is_not_authentication_without_an_engine_key(path: bytes) -> None:
    async with uvicorn_server(ServerLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no key\r\n\r\n" % path * 100)
        assert (await ended(reader)).count(b"HTTP/1.1") == ServerLimits().requests
        writer.close()
