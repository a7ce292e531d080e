"""Ports of a run on this machine: free ones, or the configured ones if nobody holds them."""

from __future__ import annotations

import contextlib
import socket

from launch.plan import Ports
from rlsys.config import Config
from rlsys.errors import UserError

_LOOPBACK = "127.0.0.1"


def choose_ports(config: Config) -> Ports:
    """Raises UserError when a configured port is taken. A free one may be lost before its role binds it."""
    engine = config.engine
    if engine.port == 0:
        *engines, rollout = _free_ports(engine.host, engine.count + 1)
        return Ports(engines, rollout)
    last = engine.port + engine.count - 1
    if last > 65535:
        raise UserError(f"engine.port = {engine.port}: {engine.count} engines reach port {last} > 65535")
    for port in range(engine.port, last + 1):
        _must_be_free(engine.host, port, engine.port)
    return Ports(list(range(engine.port, last + 1)), _free_ports(_LOOPBACK, 1)[0])


def _free_ports(host: str, n: int) -> list[int]:
    """`n` different free ports: all are held at once while they are chosen."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            _bind(s, host, 0)
        return [s.getsockname()[1] for s in sockets]


def _must_be_free(host: str, port: int, first: int) -> None:
    with socket.socket() as s:
        # As servers do: a port that only waits out a closed connection counts as free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            _bind(s, host, port)
            s.listen(1)
        except OSError:
            raise UserError(f"engine.port = {first}: port {port} of {host} is in use; 0 finds one") from None


def _bind(s: socket.socket, host: str, port: int) -> None:
    try:
        s.bind((host, port))
    except socket.gaierror as e:
        raise UserError(f"engine.host = {host!r}: {e.strerror}") from None
    except OSError as e:
        if port == 0:
            raise UserError(f"engine.host = {host!r}: cannot listen there: {e.strerror}") from None
        raise
