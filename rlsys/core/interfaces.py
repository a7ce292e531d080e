"""Selection of the network interface of process groups by the address that the run's config names.

By default, gloo listens on the address of the machine's host name, and NCCL on the first suitable interface.
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
    """Set the environment variables that make process groups use the interface with `address`.

    A variable that is set already is not changed.

    Args:
        address: IP address or host name; 0.0.0.0: the libraries' defaults.
        environment: the environment to change.

    Raises:
        UserError: no interface of this machine has the address.
    """
    if address == "0.0.0.0":
        return
    name = interface_of(address)
    for variable, value in zip(VARIABLES, (name, f"={name}"), strict=True):  # NCCL: `=` for the whole name
        environment.setdefault(variable, value)


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    return address == "localhost" or address.startswith("127.")


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with an address.

    Args:
        address: IP address or host name.

    Raises:
        UserError: the host name does not resolve, or no interface has the address.
    """
    try:
        ip = socket.gethostbyname(address)
    except OSError as e:
        raise UserError(f"{address}: the host name does not resolve: {e.strerror}") from None
    if is_loopback(ip):  # the loopback interface lists only the first of its addresses
        ip = _LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == ip for a in addresses):
            return name.partition(":")[0]  # gloo does not accept an alias
    raise UserError(f"{address}: no network interface of {socket.gethostname()} has this address")
