"""The network interface of process groups: the one with an address that the run's configuration names.

By themselves gloo listens at whatever the machine's name resolves to, and NCCL on the first interface that it finds.
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
    """Have the process groups of this process, and of those that it starts, use the interface that has `address`. A
    variable that the user has set stays.

    Raises UserError when the address is none of this machine's.
    """
    if address == "0.0.0.0":  # all interfaces, by the user's own choice
        return
    name = interface_of(address)
    for variable, value in zip(VARIABLES, (name, f"={name}"), strict=True):  # NCCL: `=` for the whole name
        environment.setdefault(variable, value)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address."""
    return address == "localhost" or address.startswith("127.")


def interface_of(address: str) -> str:
    """Name of the interface that has the address, or the address of a host name."""
    try:
        ip = socket.gethostbyname(address)
    except OSError as e:
        raise UserError(f"{address}: the host name does not resolve: {e.strerror}") from None
    if is_loopback(ip):  # all of these are the loopback interface's, which lists the first one only
        ip = _LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == ip for a in addresses):
            return name.partition(":")[0]  # an alias is no interface to gloo
    raise UserError(f"{address}: no network interface of {socket.gethostname()} has this address")
