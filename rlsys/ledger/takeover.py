"""Gives each launch a ledger file of its own where locks may not reach: what an earlier one still writes is not read.

A writer looks at who owns the run directly before each commit (writer.py). It may be stopped after that look, while
another launch takes over. On a local disk SQLite's own lock orders the two: the new writer waits for that commit, and
then has it. On a shared file system nothing holds it back, and the commit would change pages under the new writer.
There the new launch puts a copy in the file's place. The old writer keeps the old file, which nobody reads any more:
what it commits from then on has never been.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from rlsys.core.errors import disk_errors
from rlsys.ledger.store import check_format, connect, is_new, is_shared, set_journal, unusable


def take_over(path: Path, epoch: int) -> None:
    """For the launch of this epoch, before it opens the file. Nothing for a local file, and the second time.

    Raises UserError as `open_store` does, RunError when the disk refuses the copy.
    """
    if not is_shared(path) or not path.exists() or not path.stat().st_size:
        return
    try:
        with contextlib.closing(connect(path)) as db:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            if is_new(db, path):
                return
            check_format(db, path)
            set_journal(db, path, "truncate")  # undoes what a killed writer left half done
            (before,) = db.execute("SELECT value FROM meta WHERE key = 'owner_epoch'").fetchone()
            if before < epoch:
                with disk_errors(path):
                    _replace(db, path)
    except sqlite3.Error as e:
        raise unusable(path, e) from None


def _replace(db: sqlite3.Connection, path: Path) -> None:
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
