"""Ports of a run: free ones on each node, or the configured ones.

A free port is bound when it is chosen, by a socket that does not listen, and stays bound for the life of the
backend: no outgoing connection and no other search for a free port gets it. Its server binds it, too, which
Linux allows if both sockets have SO_REUSEPORT and belong to one user: another user cannot listen there, also
while our server is dead. The first socket sets the option only after it has bound, so that two runs of one
user do not share a port.

`python -m launch.ports N` prints N such ports of this machine, and reserves them until standard input ends.
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
"""{index of a node: number of ports} -> free ports there."""


def choose_ports(config: Config, layout: Layout, free: FreePorts) -> Ports:
    """Choose the run's ports.

    Raises:
        UserError: a configured port is in use.
    """
    homes = [
        shares[0].node for shares in layout.engines
    ]  # each needs a port for requests and one for its rendezvous
    need = Counter(homes) + Counter(homes)
    need[0] += 3  # the trainer's rendezvous, a reference server's, and a teacher's
    # Several nodes may be one machine: a port is used only once.
    used_ports: set[int] = set()
    stock: dict[int, list[int]] = defaultdict(list)
    while short := {node: n - len(stock[node]) for node, n in need.items() if len(stock[node]) < n}:
        for node, ports in free(short).items():
            new = [port for port in ports if port not in used_ports]
            stock[node] += new
            used_ports.update(new)
    engine_rendezvous = tuple(stock[node].pop() for node in homes)
    trainer, reference, teacher = (stock[0].pop() for _ in range(3))
    return Ports(
        _engine_ports(config) or [stock[n].pop() for n in homes],
        trainer,
        engine_rendezvous,
        reference,
        teacher,
    )


def _engine_ports(config: Config) -> list[int]:
    """Return the configured ports; empty if engine.port is 0. The backend `local` has reserved them already."""
    engine, launch = config.engine, config.launch
    ports = list(range(engine.port, engine.port + engine.count)) if engine.port else []
    if launch.nodes == 1 and launch.backend != "local":
        for port in ports:
            _check_free(engine.host, port, engine.port)
    return ports


class PortReservation:
    """Owns the sockets that reserve ports."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sockets: list[socket.socket] = []

    def choose(self, n: int) -> list[int]:
        """Reserve `n` free ports below the range of outgoing connections.

        Raises:
            UserError: the host is not this machine.
        """
        lowest_of_system = int(_SYSTEM_PORTS.read_text().split()[0]) if _SYSTEM_PORTS.exists() else 32768
        ports: list[int] = []
        while len(ports) < n:
            s = socket.socket()
            port = _random.randrange(_LOWEST, max(lowest_of_system, _LOWEST + 10_000))
            if not _bind(s, self._host, port):
                s.close()
                continue
            self._keep(s)
            ports.append(port)
        return ports

    def reserve(self, first: int, count: int) -> None:
        """Reserve the configured ports, `first` and those after it.

        Raises:
            UserError: a port is in use.
        """
        for port in range(first, first + count):
            _check_free(self._host, port, first)
            s = socket.socket()
            s.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # also while a closed connection is in TIME_WAIT
            if not _bind(s, self._host, port):
                s.close()
                raise UserError(
                    f"engine.port = {first}: port {port} of {self._host} is in use; 0 chooses a free one"
                )
            self._keep(s)

    def _keep(self, s: socket.socket) -> None:
        """Allow a server of the same user to bind the port."""
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._sockets.append(s)

    def release(self) -> None:
        """Close all sockets."""
        for s in self._sockets:
            s.close()
        self._sockets.clear()


def free_ports(host: str, n: int) -> list[int]:
    """Return `n` free ports without reserving them: another process may bind one first."""
    reservation = PortReservation(host)
    try:
        return reservation.choose(n)
    finally:
        reservation.release()


def _check_free(host: str, port: int, first: int) -> None:
    """Check that no server uses a port.

    Raises:
        UserError: it is in use.
    """
    with socket.socket() as s:
        # As servers do: a port in TIME_WAIT counts as free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not _bind(s, host, port) or not _listens(s):
            raise UserError(f"engine.port = {first}: port {port} of {host} is in use; 0 chooses a free one")


def _bind(s: socket.socket, host: str, port: int) -> bool:
    """Bind the socket; return False if the port is in use.

    Raises:
        UserError: the host is not this machine.
    """
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
    except OSError:  # another server listens there
        return False
    return True


if __name__ == "__main__":
    print(*PortReservation("").choose(int(sys.argv[1])), flush=True)
    sys.stdin.read()
