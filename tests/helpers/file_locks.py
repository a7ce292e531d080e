"""A fake of file locks on a shared file system where they do not work between machines."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

_flock = fcntl.flock


def flock_on_shared_folders(file: Any, operation: int) -> None:
    """Lock files in socket folders, which are local; elsewhere do nothing. Replaces fcntl.flock."""
    descriptor = file if isinstance(file, int) else file.fileno()
    folder = Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.name
    if folder.startswith(("rlsys-", ".rlsys-")):
        _flock(descriptor, operation)
