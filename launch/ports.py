"""Ports of a run: free ones on each node, or the configured ones if nobody holds them.

A free one is bound when it is chosen, by a socket that does not listen, and stays bound for the life of the backend:
no outgoing connection gets it, and nobody who looks for a free one. The server that it is for binds it as well, which
Linux allows where both say SO_REUSEPORT and belong to one user: another user cannot listen there, also not while our
server is dead. The first says so only after it has bound, so that two runs of one user share no port.

`python -m launch.ports N` prints N such ports of the machine it runs on, and holds them until standard input ends.
"""

from __future__ import annotations

import errno
import random
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from launch.plan import Ports
from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.planner.layout import Layout

_LOWEST = 15000
_SYSTEM_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # two runs that start together must not try the same ports

FreePorts = Callable[[Mapping[int, int]], dict[int, list[int]]]
"""{index of a node: how many} -> free ports there."""


def choose_ports(config: Config, layout: Layout, free: FreePorts) -> Ports:
    """The run's ports. Raises UserError when a configured one is taken."""
    homes = [shares[0].node for shares in layout.engines]  # each needs a port to serve, and one to meet
    need = Counter(homes) + Counter(homes)
    need[0] += 3  # where the trainer's nodes meet, a reference's, and a teacher's
    # Nodes may be one machine in disguise: what one got is not taken for another.
    taken: set[int] = set()
    stock: dict[int, list[int]] = defaultdict(list)
    while short := {node: n - len(stock[node]) for node, n in need.items() if len(stock[node]) < n}:
        for node, found in free(short).items():
            new = [port for port in found if port not in taken]
            stock[node] += new
            taken.update(new)
    meetings = tuple(stock[node].pop() for node in homes)
    trainer, reference, teacher = (stock[0].pop() for _ in range(3))
    return Ports(
        _engine_ports(config) or [stock[n].pop() for n in homes],
        trainer,
        meetings,
        reference,
        teacher,
    )


def _engine_ports(config: Config) -> list[int]:
    """The configured ones; empty when engine.port is 0. The backend `local` holds them already."""
    engine, launch = config.engine, config.launch
    found = list(range(engine.port, engine.port + engine.count)) if engine.port else []
    if launch.nodes == 1 and launch.backend != "local":
        for port in found:
            _must_be_free(engine.host, port, engine.port)
    return found


class HeldPorts:
    """Owns the sockets that hold what it chose."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sockets: list[socket.socket] = []

    def choose(self, n: int) -> list[int]:
        """`n` different ports that nobody had, below those that the system gives to outgoing connections. Raises
        UserError when the host is not this machine."""
        lowest_of_system = int(_SYSTEM_PORTS.read_text().split()[0]) if _SYSTEM_PORTS.exists() else 32768
        found: list[int] = []
        while len(found) < n:
            s = socket.socket()
            port = _random.randrange(_LOWEST, max(lowest_of_system, _LOWEST + 10_000))
            if not _bind(s, self._host, port):
                s.close()
                continue
            self._keep(s)
            found.append(port)
        return found

    def hold(self, first: int, count: int) -> None:
        """Hold configured ports, `first` and those after it. Raises UserError when one is in use."""
        for port in range(first, first + count):
            _must_be_free(self._host, port, first)
            s = socket.socket()
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # while a closed connection is waited out
            if not _bind(s, self._host, port):
                s.close()
                raise UserError(f"engine.port = {first}: port {port} of {self._host} is in use; 0 finds one")
            self._keep(s)

    def _keep(self, s: socket.socket) -> None:
        """For a server of this user alone."""
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._sockets.append(s)

    def release(self) -> None:
        for s in self._sockets:
            s.close()
        self._sockets.clear()


def free_ports(host: str, n: int) -> list[int]:
    """`n` different free ports that are let go: one may be lost before its server binds it."""
    held = HeldPorts(host)
    try:
        return held.choose(n)
    finally:
        held.release()


def _must_be_free(host: str, port: int, first: int) -> None:
    with socket.socket() as s:
        # As servers do: a port that only waits out a closed connection counts as free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not _bind(s, host, port) or not _listens(s):
            raise UserError(f"engine.port = {first}: port {port} of {host} is in use; 0 finds one")


def _bind(s: socket.socket, host: str, port: int) -> bool:
    """False when somebody has the port. Raises UserError when the host is not this machine."""
    try:
        s.bind((host, port))
    except socket.gaierror as e:
        raise UserError(f"engine.host = {host!r}: {e.strerror}") from None
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return False
        raise UserError(f"engine.host = {host!r}: cannot listen on port {port} there: {e.strerror}") from None
    return True


def _listens(s: socket.socket) -> bool:
    try:
        s.listen(1)
    except OSError:  # somebody has bound it and listens
        return False
    return True


if __name__ == "__main__":
    print(*HeldPorts("").choose(int(sys.argv[1])), flush=True)
    sys.stdin.read()
