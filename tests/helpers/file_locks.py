"""File locks as on a shared file system that keeps those of one machine from another."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

_flock = fcntl.flock


def flock_on_shared_folders(file: Any, operation: int) -> None:
    """Lock folders of sockets, which are local; everywhere else no lock excludes anybody. Replaces fcntl.flock."""
    descriptor = file if isinstance(file, int) else file.fileno()
    folder = Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.name
    if folder.startswith(("rlsys-", ".rlsys-")):
        _flock(descriptor, operation)
