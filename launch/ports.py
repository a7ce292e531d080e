"""Ports of a run: free ones on each node, or the configured ones if nobody holds them.

`python -m launch.ports N` prints N free ports of the machine it runs on.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from launch.layout import Layout
from launch.plan import Ports
from rlsys.config import Config
from rlsys.errors import UserError

_LOWEST = 15000
_SYSTEM_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # two runs that start together must not try the same ports

FreePorts = Callable[[int, int], list[int]]
"""(index of the node, how many) -> free ports there."""


def choose_ports(config: Config, layout: Layout, free: FreePorts) -> Ports:
    """Raises UserError when a configured port is taken. A free one may be lost before its role binds it."""
    homes = [shares[0].node for shares in layout.engines]  # each needs a port to serve, and one to meet
    need = Counter(homes) + Counter(homes)
    need[0] += 3  # the rollout process's, where the trainer's nodes meet, and a reference's
    # Nodes may be one machine in disguise: what one got is not taken for another.
    taken: set[int] = set()
    stock: dict[int, list[int]] = defaultdict(list)
    for node, n in need.items():
        while len(stock[node]) < n:
            new = [p for p in free(node, n) if p not in taken][: n - len(stock[node])]
            stock[node] += new
            taken.update(new)
    meetings = tuple(stock[node].pop() for node in homes)
    rollout, trainer, reference = stock[0].pop(), stock[0].pop(), stock[0].pop()
    return Ports(
        _engine_ports(config) or [stock[n].pop() for n in homes], rollout, trainer, meetings, reference
    )


def _engine_ports(config: Config) -> list[int]:
    """The configured ones; empty when engine.port is 0."""
    engine = config.engine
    if engine.port == 0:
        return []
    last = engine.port + engine.count - 1
    if config.launch.nodes == 1:
        for port in range(engine.port, last + 1):
            _must_be_free(engine.host, port, engine.port)
    return list(range(engine.port, last + 1))


def free_ports(host: str, n: int) -> list[int]:
    """`n` different free ports: all are held at once while they are chosen.

    Below those that the system gives to outgoing connections: an engine needs half a minute before it binds its
    port, long enough for some connection to get it.
    """
    lowest_of_system = int(_SYSTEM_PORTS.read_text().split()[0]) if _SYSTEM_PORTS.exists() else 32768
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < n:
            s = held.enter_context(socket.socket())
            if _bind(s, host, port := _random.randrange(_LOWEST, max(lowest_of_system, _LOWEST + 10_000))):
                found.append(port)
    return found


def _must_be_free(host: str, port: int, first: int) -> None:
    with socket.socket() as s:
        # As servers do: a port that only waits out a closed connection counts as free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not _bind(s, host, port):
            raise UserError(f"engine.port = {first}: port {port} of {host} is in use; 0 finds one")


def _bind(s: socket.socket, host: str, port: int) -> bool:
    """False when somebody has the port. Raises UserError when the host is not this machine."""
    try:
        s.bind((host, port))
        s.listen(1)
    except socket.gaierror as e:
        raise UserError(f"engine.host = {host!r}: {e.strerror}") from None
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return False
        raise UserError(f"engine.host = {host!r}: cannot listen on port {port} there: {e.strerror}") from None
    return True


if __name__ == "__main__":
    print(*free_ports("", int(sys.argv[1])))
