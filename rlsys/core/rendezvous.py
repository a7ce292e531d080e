"""Where the ranks of a process group meet.

On one machine it is a file in a folder of the run's user alone. On several it is torch's TCPStore, which by itself
listens on all addresses: here it listens on the one that the run's configuration names. torchrun is not used: its
rendezvous listens on all addresses, asks for no key, and unpickles what it is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from rlsys.core.sockets import STORE_VARIABLE

SCHEME = "rlsys"
"""`rlsys://HOST:PORT` as torch's init_method, for programs that make their process group themselves."""
_SECONDS = timedelta(minutes=30)
_BACKLOG = 2048


def store_of_ranks(rank: int, world: int) -> dist.Store:
    """The store for the ranks that `launch.ranks` started, or for one process that was started by hand."""
    if path := os.environ.get(STORE_VARIABLE):
        return dist.FileStore(path, world)
    if dist.is_torchelastic_launched():  # by hand: its agent has the store
        return next(dist.rendezvous("env://"))[0]
    if address := os.environ.get("MASTER_ADDR"):
        return bound_store(address, int(os.environ["MASTER_PORT"]), world, rank, _SECONDS)
    return dist.HashStore()


def bound_store(host: str, port: int, world: int, rank: int, timeout: timedelta) -> dist.TCPStore:
    """A store whose server, rank 0's, listens on `host` only.

    Raises RuntimeError when rank 0 cannot listen there, or the others find nobody within `timeout`.
    """
    listening = None
    if rank == 0:
        try:
            listening = socket.create_server((host, port), backlog=_BACKLOG, reuse_port=True).detach()
        except OSError as e:
            raise RuntimeError(f"cannot listen on {host}:{port}: {e.strerror}") from None
    return dist.TCPStore(
        host, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listening,
    )  # fmt: skip


def register_scheme() -> None:
    """Let torch take SCHEME as an init_method."""

    def meet(url: str, timeout: timedelta = _SECONDS, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        place = urlsplit(url)
        assert place.hostname is not None and place.port is not None, url
        members = {name: int(value) for name, value in parse_qsl(place.query)}  # torch adds both
        rank, world = members["rank"], members["world_size"]
        yield bound_store(place.hostname, place.port, world, rank, timeout), rank, world

    dist.register_rendezvous_handler(SCHEME, meet)
