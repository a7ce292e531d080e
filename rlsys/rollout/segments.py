"""The writer of segments: append-only files with records of tokens (rlsys/records.py). Rows of rollouts.sqlite point
into them.

A file has one writer, which made it: a launch that takes a run over begins files of its own, so one that was deposed
can harm nothing. The order is: append, fsync, then the COMMIT of the rows that point there. What a kill cut off has
no row, so it is absent; how many bytes that were is counted at the next opening. A file goes when no row points into
it.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

from rlsys.errors import UserError, disk_errors
from rlsys.records import FOLDER

SEGMENT_BYTES = 64 * 2**20
"""A file that has so many gets no further record. What a late sample still needs keeps the whole file."""


class Place(NamedTuple):
    """Where a record lies: the segment's number, and bytes in its file."""

    segment: int
    offset: int
    length: int


class SegmentWriter:
    """Appends records for the transactions of `db`, whose table `segments` names the files.

    Raises RunError for what the disk refuses; then the caller writes nothing more.
    """

    def __init__(self, folder: Path, db: sqlite3.Connection, epoch: int, size: int = SEGMENT_BYTES) -> None:
        """`epoch`: of the launch that writes, 0 where there is none. `size`: see SEGMENT_BYTES."""
        self._folder = folder / FOLDER
        self._db = db
        self._epoch = epoch
        self._most = size
        self._fd = -1
        self._number = 0
        self._written = 0
        self._waiting = bytearray()
        self._unsynced = False
        self.unused: list[str] = []
        """Files that no row points into: `remove` deletes them."""

    def open(self) -> int:
        """Cuts off what earlier writers had not committed. Returns how many bytes that were.

        Raises UserError when a file that rows point into is not there, or not whole.
        """
        known: dict[str, int] = dict(self._db.execute("SELECT name, length FROM segments").fetchall())
        with disk_errors(self._folder, UserError):
            self._folder.mkdir(exist_ok=True)
            own = (entry for entry in os.scandir(self._folder) if not entry.is_dir())
            there = {entry.name: entry.stat().st_size for entry in own}
            for name, length in known.items():
                if there.get(name, -1) < length:
                    found = f"it has {there[name]}" if name in there else "it is not there"
                    raise UserError(
                        f"{self._folder / name}: {length} bytes of it are in use, but {found}; restore it"
                    )
                if there[name] > length:
                    os.truncate(self._folder / name, length)
            for name in there.keys() - known.keys():
                os.unlink(self._folder / name)
        return sum(size - known.get(name, 0) for name, size in there.items())

    def append(self, record: bytes) -> Place:
        """Inside a transaction. In memory until `write_out` or `sync`."""
        if self._fd < 0 or self._written + len(self._waiting) >= self._most:
            self._begin()
        place = Place(self._number, self._written + len(self._waiting), len(record))
        self._waiting += record
        return place

    def _begin(self) -> None:
        """A new file; the one before is whole on disk, and is not touched again."""
        self.sync()
        self.close()
        row = self._db.execute("SELECT coalesce(max(segment), 0) + 1 FROM segments").fetchone()
        self._number, self._written = int(row[0]), 0
        name = f"{self._epoch:06d}-{self._number:06d}.seg"
        with disk_errors(self._folder / name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._folder / name, flags, 0o644)
            _sync_folder(self._folder)
        self._db.execute("INSERT INTO segments VALUES (?, ?, 0)", (self._number, name))
        self.forget_unused()  # of groups that nobody will train, long before the next checkpoint

    def write_out(self) -> None:
        """So that readers see it."""
        while self._waiting:
            with disk_errors(self._folder):
                done = os.write(self._fd, self._waiting)
            self._written += done
            del self._waiting[:done]
            self._unsynced = True

    def sync(self) -> None:
        """Everything that was appended is on disk when this returns; the COMMIT may follow."""
        self.write_out()
        if self._unsynced:
            with disk_errors(self._folder):
                os.fdatasync(self._fd)
            self._db.execute(
                "UPDATE segments SET length = ? WHERE segment = ?", (self._written, self._number)
            )
            self._unsynced = False

    def forget_unused(self) -> None:
        """Inside a transaction. Files without a row that points into them go after the COMMIT: `remove`."""
        unused = (
            "SELECT segment, name FROM segments WHERE segment != ? "
            "AND NOT EXISTS (SELECT 1 FROM pieces WHERE pieces.segment = segments.segment)"
        )
        for number, name in self._db.execute(unused, (self._number,)).fetchall():
            self._db.execute("DELETE FROM segments WHERE segment = ?", (number,))
            self.unused.append(name)

    def remove(self) -> None:
        """What `forget_unused` found. After the COMMIT."""
        while self.unused:
            with disk_errors(self._folder / self.unused[-1]):
                (self._folder / self.unused.pop()).unlink(missing_ok=True)

    def close(self) -> None:
        """What waits is dropped: without a COMMIT nobody has heard of it."""
        self._waiting.clear()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _sync_folder(folder: Path) -> None:
    """So that a power cut does not take a new file's name away."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
