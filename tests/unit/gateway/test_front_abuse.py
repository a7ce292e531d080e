"""The front before clients that open and say nothing, begin and do not end, ask and do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rlsys.engine_requests import sampling as requests
from rlsys.gateway.connection_limits import Door, DoorLimits
from rlsys.gateway.front import FrontLimits
from rlsys.router import dispatch
from tests.helpers.front_rig import generate, serving
from tests.helpers.http_engine import HttpEngine

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"


# -- connections (review 21, slow heads) ---------------------------------------------------------------------


@asynccontextmanager
async def behind_a_door(limits: DoorLimits) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Port of a server whose /slow answers when the event is set."""
    free = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        await free.wait()
        return web.Response(text="at last")

    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="here")

    door = Door(limits)
    app = web.Application(middlewares=[door.middleware])
    app.add_routes([web.get("/slow", slow), web.get("/quick", quick)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    server = await asyncio.get_running_loop().create_server(door.protocol(runner.server), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], free
    server.close()
    await runner.cleanup()


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


async def test_connections_that_say_nothing_keep_nobody_out() -> None:
    """Before: 260 of them, without a token, shut out everybody for as long as they liked."""
    async with behind_a_door(DoorLimits(connections=4, head_seconds=3600)) as (port, free):
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


async def test_who_is_being_served_is_not_pushed_out() -> None:
    async with behind_a_door(DoorLimits(connections=2, head_seconds=3600)) as (port, free):
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
        assert "as many clients" in error["message"]
        free.set()
        for reader, writer in served:
            assert (await reader.readuntil(b"at last")).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_a_head_has_a_deadline_and_an_answer_on_its_way_has_none() -> None:
    async with behind_a_door(DoorLimits(connections=9, head_seconds=0.1)) as (port, free):
        slow = await ask(port, "/slow")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        assert await ended(reader) == b""
        free.set()
        assert (await slow[0].readuntil(b"at last")).startswith(b"HTTP/1.1 200")
        assert await ended(slow[0]) == b"", "and then it waits for another request, not for ever"


# -- bodies and patterns (review 21) -------------------------------------------------------------------------


async def test_bodies_that_never_end_give_their_places_back() -> None:
    """Before: thirty of them filled thirty places for as long as they liked."""
    limits = FrontLimits(concurrency=1, queue=1, body_seconds=0.2)
    async with serving(limits=limits) as rig:
        server = rig.client.server
        stuck = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
            stuck.append((reader, writer))
        for reader, _ in stuck:
            assert b" 408 " in await reader.readline()
        assert (await rig.post("/generate", generate()))[0] == 200
        for _, writer in stuck:
            writer.close()


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (
            {"stop_regex": "(a|b)*c" * 60_000},
            "stop_regex: a text of 420000 characters, expected at most 1024",
        ),
        ({"stop_regex": ["a"] * 33}, "stop_regex: 33 texts, expected at most 32"),
        ({"stop": ["x" * 1025]}, "stop: a text of 1025 characters"),
    ],
)
async def test_patterns_are_measured_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], why: str
) -> None:
    """Before: one pattern held everybody up for 6.5 s."""
    parsed: list[str] = []
    plain = requests.re.compile

    def seen(pattern: str, *rest: Any) -> Any:
        parsed.append(pattern)
        return plain(pattern, *rest)

    monkeypatch.setattr(requests.re, "compile", seen)
    async with serving() as rig:
        parsed.clear()
        status, answer = await rig.post("/generate", {"text": "x", "sampling_params": sampling})
        assert (status, why in answer["error"]["message"]) == (400, True), answer
        assert not [p for p in parsed if len(p) > requests.LONGEST_STOP or p == "a"]


# -- a client that does not read (review 16) -----------------------------------------------------------------


class Fat(HttpEngine):
    """Each event is so large that a client who does not read stops the stream soon."""

    def _answer(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._answer(*args, **kwargs), "pad": "x" * 200_000}


async def test_a_client_that_does_not_read_holds_no_update_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the update waited INTERRUPT_SECONDS for it, its engine counted as dead, and the update failed."""
    monkeypatch.setattr("tests.helpers.front_rig.HttpEngine", Fat)
    async with serving(interruption="abort") as rig:
        server = rig.client.server
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (server.host, server.port))
            body = json.dumps(generate(150, stream=True)).encode()
            await loop.sock_sendall(client, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            engine = rig.fleet.pool.engines[0]
            await rig.until(lambda: any(f.blocked for f in engine.flights.values()))
            monkeypatch.setattr(dispatch, "INTERRUPT_SECONDS", 3600.0)
            status, answer = await rig.post("/update_weights_from_disk", {"model_path": "next"})
            assert (status, answer["success"]) == (200, True)
            assert engine.deaths == 0


async def test_who_hangs_up_is_told_to_the_server_behind_the_door() -> None:
    """Else its handler would work on for a client that is gone."""
    seen: list[str] = []

    class Inner(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            seen.append("made")

        def connection_lost(self, error: Exception | None) -> None:
            seen.append("lost")

    gate = Door(DoorLimits(connections=1)).protocol(Inner)()
    gate.connection_made(asyncio.Transport())
    gate.connection_lost(None)
    assert seen == ["made", "lost"]
