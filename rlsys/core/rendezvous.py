"""Rendezvous of the ranks of a process group.

On one machine the ranks meet through a file in a private folder. On several machines they use torch's TCPStore, which
listens only on the address that the run's config names. torchrun is not used, because its rendezvous listens on all
addresses, needs no key, and unpickles received data.
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
"""Scheme of the init_method `rlsys://HOST:PORT`, for programs that create their process groups themselves."""
_SECONDS = timedelta(minutes=30)
_BACKLOG = 2048


def store_of_ranks(rank: int, world: int) -> dist.Store:
    """Return the store of this rank's process group.

    `launch.ranks` sets the environment variables that locate the store. Ranks that a user starts with torchrun use
    torchrun's store, and a single process without variables uses a store in memory.

    Args:
        rank: number of this rank.
        world: number of ranks.
    """
    if path := os.environ.get(STORE_VARIABLE):
        return dist.FileStore(path, world)
    if dist.is_torchelastic_launched():
        return next(dist.rendezvous("env://"))[0]
    if address := os.environ.get("MASTER_ADDR"):
        return bound_store(address, int(os.environ["MASTER_PORT"]), world, rank, _SECONDS)
    return dist.HashStore()


def bound_store(host: str, port: int, world: int, rank: int, timeout: timedelta) -> dist.TCPStore:
    """Return a TCPStore whose server, on rank 0, listens on `host` only.

    Args:
        world: number of ranks.
        timeout: maximum time of an operation, and of the connection to the server.

    Raises:
        RuntimeError: rank 0 cannot listen on the address, or another rank cannot connect within `timeout`.
    """
    descriptor = None
    if rank == 0:
        try:
            descriptor = socket.create_server((host, port), backlog=_BACKLOG, reuse_port=True).detach()
        except OSError as e:
            raise RuntimeError(f"cannot listen on {host}:{port}: {e.strerror}") from None
    return dist.TCPStore(
        host, port, world, is_master=rank == 0, timeout=timeout, wait_for_workers=False,
        master_listen_fd=descriptor,
    )  # fmt: skip


def register_scheme() -> None:
    """Register SCHEME as a scheme of torch's init_method."""

    def rendezvous(
        url: str, timeout: timedelta = _SECONDS, **_: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None, url
        parameters = {name: int(value) for name, value in parse_qsl(address.query)}  # added by torch
        rank, world = parameters["rank"], parameters["world_size"]
        yield bound_store(address.hostname, address.port, world, rank, timeout), rank, world

    dist.register_rendezvous_handler(SCHEME, rendezvous)
