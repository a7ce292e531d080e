"""The front before clients that open and say nothing, begin and do not end, ask and do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from rlsys.engine_requests import sampling as requests
from rlsys.gateway.front import FrontLimits
from rlsys.router import dispatch
from tests.helpers.front_rig import generate, serving
from tests.helpers.http_engine import HttpEngine

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"


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
