"""Private cache folders for data that is derived from files and can be recomputed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from rlsys.core.errors import UserError, disk_errors
from rlsys.core.folders import check_owner


def cache_folder(name: str) -> Path:
    """Return the cache folder rlsys/NAME, and create it if needed.

    It is in XDG_CACHE_HOME, or else in `~/.cache`. If it cannot be created there, it is in TMPDIR.

    Raises:
        UserError: another user can write to the folder, or it cannot be created.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "rlsys" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"rlsys-cache-{os.getuid()}" / name
    with disk_errors(folder, UserError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (folder, folder.parent):
            check_owner(directory)
            if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UserError(
                    f"{directory}: writable by other users; expected a private folder (set XDG_CACHE_HOME)"
                )
    return folder
