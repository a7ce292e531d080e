"""Processes of bench/connections.py: servers, and clients that hold connections.

python bench/connections_stage.py NAME FOLDER
    Serve NAME until the process is ended. Prints the address.
python bench/connections_stage.py hold ADDRESS CASE COUNT
    Hold COUNT connections until the process is ended. Prints `ready` when all have been opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

PAUSE = 1.0
"""Seconds between two bytes of a slow connection."""
BURST = 100
"""Largest number of connections that are opened at once; after the start, in each PAUSE."""
FIRST = {
    "idle": b"",
    "slow_heads": b"GET / HTTP/1.1\r\nX: ",
    "slow_bodies": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n",
}
"""Bytes that a connection sends at once, by case."""


def hold(address: str, case: str, connections: int) -> None:
    """Hold connections open forever, and open a new one for each that the server closes.

    Prints `ready` once `connections` connections have been opened.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sockets: list[socket.socket] = []
    total, ready = 0, False
    while True:
        alive = [s for s in sockets if is_open(s, b"" if case == "idle" else b"x")]
        for s in set(sockets) - set(alive):
            s.close()
        sockets = alive
        for _ in range(min(connections - len(sockets), BURST)):
            with contextlib.suppress(OSError):
                sockets.append(open_connection(address, FIRST[case]))
                total += 1
        if total >= connections:
            if not ready:
                print("ready", flush=True)
            ready = True
            time.sleep(PAUSE)


def open_connection(address: str, first: bytes) -> socket.socket:
    """Connect to a server and send `first`. Return a non-blocking socket.

    Args:
        address: `HOST:PORT`, or the path of a Unix socket.
        first: the first bytes to send.
    """
    s = socket.socket(socket.AF_UNIX if address.startswith("/") else socket.AF_INET)
    s.settimeout(5)
    try:
        s.connect(address if address.startswith("/") else (address.split(":")[0], int(address.split(":")[1])))
        s.setblocking(False)
        s.send(first)
    except OSError:
        s.close()
        raise
    return s


def is_open(s: socket.socket, byte: bytes) -> bool:
    """Send `byte`, which may be empty. Return whether the server keeps the connection open."""
    try:
        if byte:
            s.send(byte)
        return bool(s.recv(2**12))
    except BlockingIOError:
        return True
    except OSError:
        return False


@asynccontextmanager
async def entry_point(name: str, folder: Path) -> AsyncIterator[str]:
    """Serve the server `name` with its real limits, but without the parts that real requests would reach.

    Yields:
        its address: a URL, or the path of a Unix socket.
    """
    import aiohttp
    from aiohttp import web

    from rlsys.agents.endpoint import Endpoint
    from rlsys.agents.multi_policy import EpisodeServer
    from rlsys.http_server.connections import ServerLimits
    from rlsys.http_server.server import guarded_app, serving
    from rlsys.tenants.front import Front
    from rlsys.tenants.keys import Keys
    from rlsys.viewer.server import Dashboard

    nothing = cast(Any, None)
    if name == "agents":
        async with Endpoint().listening() as endpoint:
            yield "/".join(endpoint.open().url.split("/")[:3])
    elif name == "meeting":
        async with (
            aiohttp.ClientSession() as session,
            EpisodeServer(("a", "b"), 30, session).listening(0) as url,
        ):
            yield url
    elif name == "dashboard":
        async with serving(Dashboard([], secrets.token_urlsafe()).app(), "127.0.0.1") as url:
            yield url
    elif name == "tinker":
        async with serving(Front(nothing, Keys({}), nothing).app(), "127.0.0.1") as url:
            yield url
    else:
        assert name == "commands", name

        async def status(_: web.Request) -> web.Response:
            return web.json_response({})

        async with serving(
            guarded_app([web.get("/status", status)], ServerLimits()), folder / "rollout"
        ) as path:
            yield path


def serve_exporter(folder: Path) -> None:
    """Serve the supervisor's metrics until the process is ended. Prints the address."""
    from launch.exporter import Exporter, serve_metrics

    with serve_metrics(Exporter(cast(Any, None)), 0, folder / "run", []) as port:
        print(f"127.0.0.1:{port}", flush=True)
        threading.Event().wait()


def serve_environment(folder: Path) -> None:
    """Serve an environment process without an environment until the process is ended. Prints the address."""
    from rlsys.environments.serve import serve

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "environment"))
    listening.listen(1024)
    print(folder / "environment", flush=True)
    serve(cast(Any, None), listening, 16, 60.0, secrets.token_urlsafe()).serve_forever()


async def serve_until_ended(name: str, folder: Path) -> None:
    """Serve the server `name` until the process is ended. Prints the address."""
    async with entry_point(name, folder) as address:
        print(address.removeprefix("http://"), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    if sys.argv[1] == "hold":
        address, case, connections = sys.argv[2:]
        hold(address, case, int(connections))
        return
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "exporter":
        serve_exporter(folder)
    elif name == "environment":
        serve_environment(folder)
    else:
        asyncio.run(serve_until_ended(name, folder))


if __name__ == "__main__":
    main()
