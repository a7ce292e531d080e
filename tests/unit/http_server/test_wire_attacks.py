"""Bytes on a connection that no client of ours sends: each is answered or closed, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import psutil
import pytest
from aiohttp import web

from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import LIMITER, Refusal, guarded_app, read_json, serving
from rlsys.tenants.front import Front, ServerInfo
from rlsys.tenants.keys import Keys
from rlsys.tenants.service import Service
from rlsys.viewer.server import Dashboard

LIMITS = ServerLimits(connections=64, body_bytes=2**16)
POST = b"POST /body HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /secret HTTP/1.1\r\nHost: x\r\n"
POST_SECRET = b"POST /secret HTTP/1.1\r\nHost: x\r\n"
PACKED = gzip.compress(bytes(2**20))
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = (
    b"GET /quick HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MOST_SENT, MOST_KEPT = 64 * 2**20, 32 * 2**20
ASKED = 20
"""Requests of another client during an attack."""


@asynccontextmanager
async def server(limits: ServerLimits = LIMITS) -> AsyncIterator[int]:
    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="here")

    async def body(request: web.Request) -> web.Response:
        return web.json_response(await read_json(request))

    def admit(request: web.Request) -> None:
        if request.path == "/secret":
            raise Refusal(401, "no key")

    routes = [web.get("/quick", quick), web.get("/secret", quick), web.post("/body", body)]
    app = guarded_app([*routes, web.post("/secret", body)], limits, admit=admit)
    async with serving(app, "127.0.0.1") as url:
        yield int(url.rpartition(":")[2])


async def asked(port: int, raw: bytes) -> bytes:
    """What comes until the first line of the answer ends, or the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    try:
        return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def with_body(head: bytes, body: bytes) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


ODD = {
    "arabic digits as the length": (POST + b"Content-Length: \xd9\xa1\r\n\r\n1", 400),
    "superscript digits as the length": (POST + b"Content-Length: \xb2\r\n\r\n11", 400),
    "a sign before the length": (POST + b"Content-Length: +1\r\n\r\n1", 400),
    "an underscore in the length": (POST + b"Content-Length: 1_0\r\n\r\n1234567890", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "a length beyond 64 bits": (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n11", 400),
    "length and chunks": (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks of a negative length": (CHUNKED + b"-1\r\n\r\n", 400),
    "an absolute URI": (b"GET http://evil.example/secret HTTP/1.1\r\nHost: x\r\n\r\n", 401),
    "an absolute URI of no host": (b"GET http://[/secret HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a port beyond 65535": (b"GET http://x:99999999/quick HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "two slashes": (b"GET //evil.example/quick HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "a path that climbs": (b"GET /quick/../secret HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "bytes in the path": (b"GET /quick?\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "any host": (b"GET /secret HTTP/1.1\r\nHost: evil.example\r\n\r\n", 401),
    "a key of bytes": (GET + b"Authorization: Bearer \xff\xfe\r\n\r\n", 401),
    "CONNECT": (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "OPTIONS of everything": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "an upgrade to WebSocket": (UPGRADE, 200),
    "an upgrade to h2c": (b"GET /quick HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 200),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
    "100,000 headers": (GET + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)) + b"\r\n", 400),
    "a header of 1 MiB": (GET + b"X-A: " + b"a" * 2**20 + b"\r\n\r\n", 400),
    "a header that is folded": (GET + b"X-A: b\r\n c\r\n\r\n", 400),
    "an unknown expectation": (with_body(POST + b"Expect: nonsense\r\n", b"{}"), 417),
    "a body of brackets": (with_body(POST, b"[" * 60_000), 400),
    "a body of deep objects": (with_body(POST, b'{"a":' * 10_000), 400),
    "gzip with a key": (with_body(POST + b"Content-Encoding: gzip\r\n", PACKED), 415),
    "gzip without": (with_body(POST_SECRET + b"Content-Encoding: gzip\r\n", PACKED), 401),
    "deflate": (with_body(POST + b"Content-Encoding: deflate\r\n", zlib.compress(b"{}")), 415),
    "a coding that nobody knows": (with_body(POST + b"Content-Encoding: GZIP, br\r\n", b"{}"), 415),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
async def test_security_an_odd_request_is_refused_or_answered(name: str) -> None:
    raw, status = ODD[name]
    async with server() as port:
        # a connection that is closed while its client sends may be reset before the answer is read
        assert (line := await asked(port, raw)) == b"" or b" %d " % status in line, line
        assert b" 200 " in await asked(port, b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_security_a_compressed_body_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB of a client without a key, of which 1 GiB would come: nobody was served for 5 seconds."""
    unpacked: list[int] = []

    class Counted:
        def __init__(self, *_: object, **__: object) -> None:
            unpacked.append(1)
            raise AssertionError("a body is unpacked")

    monkeypatch.setattr("aiohttp.http_parser.ZLibDecompressor", Counted)
    async with server() as port:
        for path in (b"/secret", b"/body", b"/nowhere"):
            head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n" % path
            await asked(port, with_body(head, PACKED))
    assert not unpacked


ENDLESS = {
    "headers": (GET, b"".join(b"X-%d: y\r\n" % i for i in range(10_000))),
    "a header": (GET + b"X-A: ", b"a" * 2**16),
    "a path": (b"GET /", b"a" * 2**16),
    "no HTTP": (b"", b"x" * 2**16),
    "chunks": (CHUNKED, b"10000\r\n" + b"x" * 2**16 + b"\r\n"),
    "chunks without a key": (CHUNKED.replace(b"/body", b"/secret"), b"10000\r\n" + b"x" * 2**16 + b"\r\n"),
    "an extension of a chunk": (CHUNKED + b"1;", b"x" * 2**16),
    "trailers": (CHUNKED + b"0\r\n", b"".join(b"X-%d: y\r\n" % i for i in range(10_000))),
    "a body that nobody reads": (POST_SECRET + b"Content-Length: 99999999999\r\n\r\n", b"x" * 2**16),
    "what follows an upgrade": (UPGRADE, b"x" * 2**16),
    "requests": (b"", (GET + b"\r\n") * 2000),
    "requests with bodies": (b"", with_body(POST, b"[" + b"1," * 4000 + b"1]") * 20),
}  # fmt: skip


@pytest.mark.gate
@pytest.mark.parametrize("name", ENDLESS)
async def test_security_endless_input_is_neither_buffered_nor_blocks_other_clients(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    request_head, chunk = ENDLESS[name]
    caplog.set_level(logging.INFO)
    loop = asyncio.get_running_loop()

    async def attack(port: int) -> None:
        with socket.socket() as connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, request_head)
            for _ in range(MOST_SENT // len(chunk)):
                await loop.sock_sendall(connection, chunk)

    async with server() as port:
        rss_before = psutil.Process().memory_info().rss
        attacks = [asyncio.create_task(attack(port)) for _ in range(4)]
        for _ in range(ASKED):
            assert b" 200 " in await asked(port, b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n")
        rss_growth = psutil.Process().memory_info().rss - rss_before
        for each in attacks:
            each.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
    assert rss_growth < MOST_KEPT
    lines = [logging.Formatter().format(r) for r in caplog.records if r.name.startswith("rlsys.http_server")]
    assert sum(map(len, lines)) < 4000 and all("\n" not in line for line in lines), lines


@pytest.mark.parametrize(
    "begun", [b"", b"GET /qu", GET, GET + b"\r\n", with_body(POST, b"{}")[:-1], CHUNKED + b"9\r\n"]
)
async def test_security_a_half_closed_connection_is_closed(begun: bytes) -> None:
    async with server(ServerLimits(connections=9, head_seconds=0.1, body_seconds=0.1, body_bytes=99)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the server closes, too
        writer.close()
        assert b" 200 " in await asked(port, b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n")


# -- requests in advance, without a token ---------------------------------------------------------------------

IN_ADVANCE = 100


async def answers_to(port: int, raw: bytes, head: bytes) -> tuple[int, bytes]:
    """Count the answers to `IN_ADVANCE` requests that are sent at once, and return all that comes with them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw * (IN_ADVANCE - 1) + raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    received = bytearray()
    with contextlib.suppress(ConnectionError):  # what the server does not read resets the connection
        while part := await reader.read(2**16):
            received += part
    writer.close()
    return received.count(head), bytes(received)


@pytest.mark.parametrize(
    "raw",
    [
        GET + b"\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /quick HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Content-Length: 0\r\n\r\n",
        b"GET /quick HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n\r\n",
    ],
    ids=["401", "404", "405", "400", "415"],
)
async def test_security_h6_the_server_closes_the_connection_after_a_refusal(raw: bytes) -> None:
    async with server() as port:
        count, received = await answers_to(port, raw, b"HTTP/1.1 4")
    assert count == 1 and b"Connection: close" in received


async def test_security_h6_a_client_without_token_gets_few_responses_per_connection() -> None:
    async with server() as port:
        count, received = await answers_to(port, b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200")
    assert count == 16 and received.count(b"Connection: close") == 1


async def test_security_h6_a_client_that_never_reads_its_response_is_evicted() -> None:
    """Before: clients that ask for much and read nothing held all places as long as they liked."""

    async def much(_: web.Request) -> web.Response:
        return web.Response(body=bytes(64 * 2**20))

    app = guarded_app([web.get("/much", much)], ServerLimits(connections=2, head_seconds=3600))
    async with serving(app, "127.0.0.1") as url:
        port = int(url.rpartition(":")[2])
        readers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            readers.append((reader, writer))
        line = await asked(port, b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n")
        for _, writer in readers:
            writer.transport.abort()
    assert b" 404 " in line and app[LIMITER].counts["evicted"] == 1


SERVERS: dict[str, Callable[[], web.Application]] = {
    "tenants": lambda: Front(cast(Service, None), Keys({"a": "key"}), cast(ServerInfo, None)).app(),
    "dashboard": lambda: Dashboard([], "key").app(),
}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("key", ["", "key"])
async def test_security_h6_a_key_keeps_the_connection(name: str, key: str) -> None:
    app = SERVERS[name]()
    async with serving(app, "127.0.0.1") as url:
        cookie = f"rlsys-dash-{hashlib.sha256(b'key').hexdigest()[:8]}={key}"
        raw = f"GET /nowhere HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\nCookie: {cookie}\r\n\r\n".encode()
        count, _ = await answers_to(int(url.rpartition(":")[2]), raw, b"HTTP/1.1 4")
    assert count == (IN_ADVANCE if key else 1)
