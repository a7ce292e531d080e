"""Ports of a run: free ports on each node, or the configured ones.

A socket that does not listen reserves a port: it is bound when the port is chosen, and stays bound as long as the
backend is open. So no outgoing connection and no other search for a free port gets the port. The port's server binds
it, too, which Linux allows if both sockets have SO_REUSEPORT and belong to one user. Another user cannot listen on
the port, even while the server is dead. The reserving socket sets the option only after it has bound, so that two
runs of one user do not share a port.

`python -m launch.ports N` prints N free ports of this machine, and reserves them until standard input ends.
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
_random = (
    random.SystemRandom()
)  # a seeded generator would make two runs that start together try the same ports

FreePorts = Callable[[Mapping[int, int]], dict[int, list[int]]]
"""Maps {index of a node: number of ports} to {index of the node: free ports}."""


def choose_ports(config: Config, layout: Layout, free: FreePorts) -> Ports:
    """Choose the run's ports.

    Args:
        config: config of the run.
        layout: nodes of trainer and engines.
        free: reserves free ports.

    Raises:
        UserError: a configured port is in use.
    """
    engine_nodes = [shares[0].node for shares in layout.engines]
    # Each engine needs a port for requests and one for its rendezvous.
    counts = Counter(engine_nodes) + Counter(engine_nodes)
    counts[0] += 3  # rendezvous of the trainer, reference server, teacher server
    ports_by_node = _distinct_ports(counts, free)
    engine_rendezvous = tuple(ports_by_node[node].pop() for node in engine_nodes)
    trainer, reference, teacher = (ports_by_node[0].pop() for _ in range(3))
    engines = _engine_ports(config) or [ports_by_node[node].pop() for node in engine_nodes]
    return Ports(engines, trainer, engine_rendezvous, reference, teacher)


def _distinct_ports(counts: Mapping[int, int], free: FreePorts) -> dict[int, list[int]]:
    """Reserve `counts[node]` ports on each node. No two nodes get the same port, because they may be one machine."""
    used_ports: set[int] = set()
    ports_by_node = defaultdict[int, list[int]](list)
    while missing := {
        node: n - len(ports_by_node[node]) for node, n in counts.items() if len(ports_by_node[node]) < n
    }:
        for node, ports in free(missing).items():
            new_ports = [port for port in ports if port not in used_ports]
            ports_by_node[node] += new_ports
            used_ports.update(new_ports)
    return ports_by_node


def _engine_ports(config: Config) -> list[int]:
    """Return the configured ports of the engines; empty if engine.port is 0.

    They are checked unless the backend `local` has reserved them, or the run has several nodes.

    Raises:
        UserError: a port is in use.
    """
    engine, launch = config.engine, config.launch
    ports = list(range(engine.port, engine.port + engine.count)) if engine.port else []
    if launch.nodes == 1 and launch.backend != "local":
        for port in ports:
            _check_free(engine.host, port, engine.port)
    return ports


class PortReservation:
    """Owns the sockets that reserve ports."""

    def __init__(self, host: str) -> None:
        """Create a reservation without ports. `host`: address of this machine; empty for all addresses."""
        self._host = host
        self._sockets: list[socket.socket] = []

    def choose(self, n: int) -> list[int]:
        """Reserve `n` free ports below the range of outgoing connections, and return them.

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
            self._add(s)
            ports.append(port)
        return ports

    def reserve(self, first: int, count: int) -> None:
        """Reserve `count` consecutive ports from `first` on.

        Raises:
            UserError: a port is in use.
        """
        for port in range(first, first + count):
            _check_free(self._host, port, first)
            s = socket.socket()
            # A port with a closed connection in TIME_WAIT counts as free, as it does for servers.
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not _bind(s, self._host, port):
                s.close()
                raise UserError(
                    f"engine.port = {first}: port {port} of {self._host} is in use; 0 chooses a free one"
                )
            self._add(s)

    def _add(self, s: socket.socket) -> None:
        """Add a bound socket, and allow servers of the same user to bind its port."""
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._sockets.append(s)

    def release(self) -> None:
        """Close all sockets."""
        for s in self._sockets:
            s.close()
        self._sockets.clear()


def free_ports(host: str, n: int) -> list[int]:
    """Return `n` free ports without reserving them, so another process may bind one."""
    reservation = PortReservation(host)
    try:
        return reservation.choose(n)
    finally:
        reservation.release()


def _check_free(host: str, port: int, first: int) -> None:
    """Check that no server uses a port of the configured ports, which start at `first`.

    Raises:
        UserError: the port is in use.
    """
    with socket.socket() as s:
        # A port with a closed connection in TIME_WAIT counts as free, as it does for servers.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not _bind(s, host, port) or not _can_listen(s):
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
        raise UserError(
            f"engine.host = {host!r}: cannot listen on port {port} of this address: {e.strerror}"
        ) from None
    return True


def _can_listen(s: socket.socket) -> bool:
    """Return whether the socket can listen on its port, on which no other server listens then."""
    try:
        s.listen(1)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(*PortReservation("").choose(int(sys.argv[1])), flush=True)
    sys.stdin.read()
