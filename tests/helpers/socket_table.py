"""Every listening socket of a run: whose it is, where it may be, and what keeps strangers out. docs/cluster.md has the
same table in words.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.listeners import Listener

LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+|::1")


@dataclass(frozen=True)
class Entry:
    """`command`: a pattern of the process's command line. `guard`: what authenticates a client."""

    kind: str
    command: str
    guard: str


ENGINE, RANK = r"rlsys\.engine\.server|^sglang", r"-m rlsys\.(train|trainer\.sft|tenants\.serve) "
TABLE = (
    Entry("tcp", ENGINE, "HTTP: the engine's keys; the process groups of its ranks: nothing, peers only"),
    Entry("unix", ENGINE, "a folder of the run's user alone"),
    Entry("unix", r"-m rlsys\.rollout\.service ", "a folder of the run's user alone, and the run's key"),
    Entry("tcp", RANK, "process groups of gloo and NCCL: nothing, peers only"),
    Entry("unix", r"torch_shm_manager", "a folder of the run's user alone"),
)


def entry_of(listener: Listener, table: Iterable[Entry] = TABLE) -> Entry | None:
    return next(
        (e for e in table if e.kind == listener.kind and re.search(e.command, listener.command)), None
    )


def faults(
    found: Iterable[Listener], addresses: Iterable[str] = (), table: Iterable[Entry] = TABLE
) -> list[str]:
    """What is wrong with listeners. `addresses`: those that the config names, besides loopback."""
    wrong = []
    for one in sorted(found, key=lambda one: (one.command, one.address)):
        words = f"{one.kind} {one.address} of {one.command[:120]}"
        if one.kind == "unix":
            if reason := _open_to_others(one.address):
                wrong.append(f"{words}: {reason}")
        elif not LOOPBACK.fullmatch(one.host) and one.host not in addresses:
            wrong.append(f"{words}: neither loopback nor an address of the config")
        if entry_of(one, table) is None:
            wrong.append(f"{words}: not in the table of sockets")
    return wrong


def _open_to_others(address: str) -> str:
    if not address or address.startswith("@"):
        return "an abstract socket has no permissions"
    for folder in Path(address).parents:
        try:
            if stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0:
                return ""
        except FileNotFoundError:  # the run has ended meanwhile
            return ""
    return "every user can reach its folder"
