"""Takeover of the ledger by a new launch: on a shared file system, each launch works on its own copy of the file.

A writer checks the owner of the run directly before each commit (writer.py). It may be suspended between this check
and the commit, while another launch takes over. On a local disk, SQLite's lock makes the new writer wait for the
commit. On a shared file system, locks are not reliable, and the commit would change pages that the new writer uses.
Therefore the new launch replaces the file by a copy there. The old writer then commits to the old file, which no
other process reads.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from rlsys.core.errors import disk_errors
from rlsys.ledger.store import check_format, connect, is_new, is_shared, set_journal, unusable


def take_over(path: Path, epoch: int) -> None:
    """Replace a ledger on a shared file system by a copy for a new launch. Call before the file is opened.

    A file on a local disk, and a copy that this launch has made before, are not replaced.

    Args:
        path: the ledger.
        epoch: epoch of the new launch.

    Raises:
        UserError: the file is not a ledger, is damaged, or has another schema.
        RunError: the copy cannot be written.
    """
    if not is_shared(path) or not path.exists() or not path.stat().st_size:
        return
    try:
        with contextlib.closing(connect(path)) as db:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            if is_new(db, path):
                return
            check_format(db, path)
            set_journal(db, path, "truncate")  # rolls back the transaction of a killed writer
            (previous_epoch,) = db.execute("SELECT value FROM meta WHERE key = 'owner_epoch'").fetchone()
            if previous_epoch < epoch:
                with disk_errors(path):
                    _replace(db, path)
    except sqlite3.Error as e:
        raise unusable(path, e) from None


def _replace(db: sqlite3.Connection, path: Path) -> None:
    """Replace the file atomically by a copy of the database `db`, on disk when the function returns."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with contextlib.closing(connect(part)) as copy:
        copy.execute("PRAGMA synchronous=FULL")
        db.backup(copy)
    path.with_name(path.name + "-journal").unlink(missing_ok=True)  # the old writer may have it open
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
