"""The front before clients that open and say nothing, begin and do not end, ask and do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rlsys.gateway import event_stream
from rlsys.gateway.front import FrontLimits
from tests.helpers.front_rig import generate, serving
from tests.helpers.http_engine import HttpEngine

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"


# -- bodies (review 21) --------------------------------------------------------------------------------------


async def test_incomplete_request_bodies_time_out_and_free_their_slots() -> None:
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


# -- a client that does not read (review 16) -----------------------------------------------------------------


class Fat(HttpEngine):
    """Each event is so large that a client who does not read stops the stream soon."""

    def _answer(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._answer(*args, **kwargs), "pad": "x" * 200_000}


async def test_a_client_that_does_not_read_delays_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are buffered in its sample, and an update of the weights does not wait for it."""
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
            await rig.until(lambda: len(rig.engines[0].requests) == 1 and not engine.load)
            assert rig.fleet.router.stats()["received_tokens"] == 150
            status, answer = await rig.post("/update_weights_from_disk", {"model_path": "next"})
            assert (status, answer["success"]) == (200, True)
            assert engine.deaths == 0


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "READER_SECONDS", 0.1)

    class Stuck(web.StreamResponse):
        async def write(self, data: bytes) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    monkeypatch.setattr(event_stream, "web", SimpleNamespace(StreamResponse=Stuck))
    async with serving() as rig:
        with pytest.raises(aiohttp.ClientPayloadError):
            await rig.post("/generate", generate(stream=True))
        await rig.until(lambda: not rig.fleet.pool.in_flight)


async def test_requests_of_a_disconnected_client_are_aborted() -> None:
    async with serving() as rig:
        rig.engines[0].hold_at = 5
        task = asyncio.create_task(rig.post("/generate", generate(stream=True)))
        await rig.until(lambda: rig.fleet.pool.in_flight == 1)
        task.cancel()
        await rig.until(lambda: rig.fleet.pool.in_flight == 0)
