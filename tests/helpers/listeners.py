"""Listening TCP, UDP and Unix sockets of a process and its descendants, according to the kernel.

psutil does not report the listening state of Unix sockets, which is read from /proc/PID/net/unix.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ACCEPTS = 0x10000
"""SO_ACCEPTCON in the flags of /proc/net/unix."""


@dataclass(frozen=True)
class Listener:
    """A listening socket."""

    kind: str
    """`tcp`, `udp` or `unix`."""
    command: str
    """Command line of the process."""
    address: str
    """HOST:PORT, or the path of a Unix socket; `@...` is an abstract one, which has no permissions."""
    reached_by: str = ""
    """Description of the other users who can connect to a Unix socket; empty if none can."""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


def listeners(root: int) -> set[Listener]:
    """Return the listening sockets of process `root` and its descendants."""
    endpoints: set[Listener] = set()
    for process in _process_tree(root):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError):
            command = " ".join(process.cmdline())
            if not command:  # it is exiting
                continue
            for c in process.net_connections("inet"):
                bound = c.status == psutil.CONN_LISTEN or (c.type.name == "SOCK_DGRAM" and not c.raddr)
                if bound and c.laddr:
                    kind = "tcp" if c.status == psutil.CONN_LISTEN else "udp"
                    endpoints.add(Listener(kind, command, f"{c.laddr.ip}:{c.laddr.port}"))
            for path in _unix_sockets(process.pid):
                endpoints.add(Listener("unix", command, path, _reached_by(path)))
    return endpoints


def _process_tree(root: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(root)
        return [first, *first.children(recursive=True)]
    return []


def _unix_sockets(pid: int) -> Iterator[str]:
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink())):
                inodes.add(match[1])
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & _ACCEPTS:
            yield fields[7] if len(fields) > 7 else ""


def _reached_by(path: str) -> str:
    """Describe who can connect to a Unix socket; empty if a folder above it is closed to other users."""
    if not path or path.startswith("@"):
        return "everybody: an abstract socket has no permissions"
    if not Path(
        path
    ).parent.exists():  # its process is ending and has removed the folder: no path leads to it
        return ""
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in Path(path).parents]
    return "" if any(mode & 0o077 == 0 for mode in modes) else "everybody: its folders let others in"
