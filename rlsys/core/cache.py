"""A folder of one's own for what is derived from files and can be made again."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from rlsys.core.errors import UserError, disk_errors


def cache_folder(name: str) -> Path:
    """`rlsys/NAME` in XDG_CACHE_HOME, or in `~/.cache`; in TMPDIR for a user whose home folder cannot be written.
    Raises UserError for a folder that others may write."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "rlsys" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"rlsys-cache-{os.getuid()}" / name
    with disk_errors(folder, UserError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for owned in (folder, folder.parent):
            status = owned.stat()
            if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UserError(
                    f"{owned}: others may write there; expected a folder of one's own (XDG_CACHE_HOME)"
                )
    return folder
