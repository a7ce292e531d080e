"""Network interface of process groups: the one with the address that the run's configuration names.

By default gloo listens on the address of the machine's host name, and NCCL on the first interface that it
finds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

import psutil

from rlsys.core.errors import UserError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "127.0.0.1"


def choose_interface(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make the process groups of this process and of its children use the interface with `address`.

    Variables that the user has set are kept.

    Raises:
        UserError: no interface of this machine has the address.
    """
    if address == "0.0.0.0":  # all interfaces, by the user's own choice
        return
    name = interface_of(address)
    for variable, value in zip(VARIABLES, (name, f"={name}"), strict=True):  # NCCL: `=` for the whole name
        environment.setdefault(variable, value)


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    return address == "localhost" or address.startswith("127.")


def interface_of(address: str) -> str:
    """Return the name of the interface with an IP address, or with the address of a host name."""
    try:
        ip = socket.gethostbyname(address)
    except OSError as e:
        raise UserError(f"{address}: the host name does not resolve: {e.strerror}") from None
    if is_loopback(ip):  # the loopback interface has all of these addresses, and lists only the first
        ip = _LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == ip for a in addresses):
            return name.partition(":")[0]  # an alias is no interface to gloo
    raise UserError(f"{address}: no network interface of {socket.gethostname()} has this address")
