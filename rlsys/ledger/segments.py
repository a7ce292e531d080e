"""Segments: append-only files with records of tokens (rlsys/segments/records.py), and the ledger's table of them.

A file has one writer, which made it: a launch that takes a run over begins files of its own, so one that was deposed
can harm nothing. The order is: write, fsync, then the COMMIT of the rows that point there. Who commits does the
fsync, also for files that another process writes. What a kill cut off has no row, so it is absent; how many bytes
that were is counted when the writer is found gone. A file goes when no row points into it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rlsys.core.errors import RlsysError, RunError, UserError, disk_errors
from rlsys.core.spans import Piece
from rlsys.segments.records import FOLDER

SEGMENT_BYTES = 64 * 2**20
"""A file that has so many gets no further record. What a late sample still needs keeps the whole file."""


class SegmentFile:
    """Appends records to files of its own, WRITER-NUMBER.seg in a run's folder. Raises RunError for what the disk
    refuses; then the caller writes nothing more."""

    def __init__(self, folder: Path, writer: str, size: int = SEGMENT_BYTES) -> None:
        """`writer`: nobody else's name, ever. `size`: see SEGMENT_BYTES."""
        self._folder = folder / FOLDER
        self._writer = writer
        self._most = size
        self._fd = -1
        self._name = ""
        self._number = 0
        self._written = 0
        self._waiting = bytearray()

    def append(self, record: bytes) -> Piece:
        """In memory until `write_out`."""
        if self._fd < 0 or self._written + len(self._waiting) >= self._most:
            self._begin()
        piece = Piece(self._name, self._written + len(self._waiting), len(record))
        self._waiting += record
        return piece

    def _begin(self) -> None:
        """A new file; the one before is not touched again."""
        self.write_out()
        self.close()
        self._number += 1
        self._name, self._written = f"{self._writer}-{self._number:06d}.seg", 0
        with disk_errors(self._folder / self._name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._folder / self._name, flags, 0o644)
            _sync_folder(self._folder)

    def write_out(self) -> None:
        """So that readers see it, and a `SegmentTable` can make it last."""
        while self._waiting:
            with disk_errors(self._folder):
                done = os.write(self._fd, self._waiting)
            self._written += done
            del self._waiting[:done]

    def close(self) -> None:
        """What waits is dropped: nobody has heard of it."""
        self._waiting.clear()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class SegmentTable:
    """Owns the tables segments and pieces of `db`: which files there are, how far they count, who points there."""

    def __init__(self, folder: Path, db: sqlite3.Connection) -> None:
        self._folder = folder / FOLDER
        self._db = db
        self._numbers: dict[str, int] = {}
        self._last: dict[str, str] = {}
        """Writer -> the file that it was last heard to append to. No earlier one of its files grows any more."""
        self._reach: dict[str, int] = {}
        """File -> where its last piece ends, of those whose pieces are not on disk yet."""
        self.unused: list[str] = []
        """Files that no row points into: `remove` deletes them."""

    def open(self) -> int:
        """Cuts off what earlier writers had not committed. Returns how many bytes that were.

        Raises UserError when a file that rows point into is not there, or not whole.
        """
        with disk_errors(self._folder, UserError):
            self._folder.mkdir(exist_ok=True)
        return self._cut(lambda name: True, UserError)

    def retire(self, writer: str) -> int:
        """Inside a transaction. The writer is gone: cuts off what it had not told. Returns how many bytes that were.

        Raises RunError when what it told is not there.
        """
        self._last.pop(writer, None)
        return self._cut(lambda name: writer_of(name) == writer, RunError)

    def _cut(self, of: Callable[[str], bool], error: type[RlsysError]) -> int:
        rows = self._db.execute("SELECT name, length FROM segments").fetchall()
        known = {name: max(length, self._reach.get(name, 0)) for name, length in rows if of(name)}
        with disk_errors(self._folder, error):
            own = (entry for entry in os.scandir(self._folder) if not entry.is_dir() and of(entry.name))
            there = {entry.name: entry.stat().st_size for entry in own}
            for name, length in known.items():
                if there.get(name, -1) < length:
                    found = f"it has {there[name]}" if name in there else "it is not there"
                    raise error(
                        f"{self._folder / name}: {length} bytes of it are in use, but {found}; restore it"
                    )
                if there[name] > length:
                    os.truncate(self._folder / name, length)
            for name in there.keys() - known.keys() - set(self.unused):
                os.unlink(self._folder / name)
        return sum(size - known.get(name, 0) for name, size in there.items() if name not in self.unused)

    def point(self, placed: Iterable[tuple[int, int, Iterable[Piece]]]) -> None:
        """Inside a transaction: what came of these sequences, by sample and number, lies there."""
        rows: list[tuple[int, int, int, int, int]] = []
        for sample_id, sequence, pieces in placed:
            for name, offset, length in pieces:
                if name not in self._numbers:
                    self._insert(rows)  # first: `_begin` looks which files nothing points into
                    rows = []
                    self._begin(name)
                rows.append((sample_id, sequence, self._numbers[name], offset, length))
                self._reach[name] = max(self._reach.get(name, 0), offset + length)
        self._insert(rows)

    def _insert(self, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        insert = "INSERT INTO pieces (sample_id, sequence, segment, start, length) VALUES (?, ?, ?, ?, ?)"
        self._db.executemany(insert, rows)

    def _begin(self, name: str) -> None:
        number = self._db.execute("INSERT INTO segments (name, length) VALUES (?, 0)", (name,)).lastrowid
        assert number is not None
        self._numbers[name] = number
        self._last[writer_of(name)] = name
        self.forget_unused()  # of groups that nobody will train, long before the next checkpoint

    def sync(self) -> None:
        """Inside a transaction. Everything that was pointed at and written out is on disk when this returns; the
        COMMIT may follow."""
        for name, end in self._reach.items():
            with disk_errors(self._folder / name):
                _sync_file(self._folder / name)
            self._db.execute("UPDATE segments SET length = ? WHERE name = ?", (end, name))
        self._reach.clear()

    def forget_unused(self) -> None:
        """Inside a transaction. Files without a row that points into them go after the COMMIT: `remove`."""
        unused = (
            "SELECT name FROM segments "
            "WHERE NOT EXISTS (SELECT 1 FROM pieces WHERE pieces.segment = segments.segment)"
        )
        growing = set(self._last.values())
        for (name,) in self._db.execute(unused).fetchall():
            if name not in growing:
                self._db.execute("DELETE FROM segments WHERE name = ?", (name,))
                self._numbers.pop(name, None)
                self._reach.pop(name, None)
                self.unused.append(name)

    def remove(self) -> None:
        """What `forget_unused` found. After the COMMIT."""
        while self.unused:
            with disk_errors(self._folder / self.unused[-1]):
                (self._folder / self.unused.pop()).unlink(missing_ok=True)


def writer_of(name: str) -> str:
    """Of a segment file's name, WRITER-NUMBER.seg."""
    return name.rpartition("-")[0]


def _sync_file(path: Path) -> None:
    """All of its bytes, whoever wrote them."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """So that a power cut does not take a new file's name away."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
