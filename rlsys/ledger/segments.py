"""Segments: append-only files with records of tokens (rlsys/segments/records.py), and the references to them.

The process that creates a file is its only writer. A launch that takes over a run starts new files, so the previous
launch cannot damage them. A writer writes the bytes; the process that commits then syncs the files of all writers,
and commits the rows that reference the bytes. Bytes without a row are ignored; when their writer has exited, they are
removed and counted as torn. A file is deleted when no row references it.
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
"""Size in bytes at which a file gets no more records. A file exists as long as a sample needs one of its records."""


class SegmentFile:
    """Appends records to the files of one writer, WRITER-NUMBER.seg.

    Methods raise RunError for a disk error. The caller must not write after such an error.
    """

    def __init__(self, folder: Path, writer: str, size: int = SEGMENT_BYTES) -> None:
        """Create a writer without a file; the first record creates one.

        Args:
            folder: the run folder.
            writer: name of the writer, unique in the run.
            size: size in bytes at which a file gets no more records.
        """
        self._folder = folder / FOLDER
        self._writer = writer
        self._max_bytes = size
        self._fd = -1
        self._name = ""
        self._number = 0
        self._written_bytes = 0
        self._pending = bytearray()

    def append(self, record: bytes) -> Piece:
        """Add a record to the buffer that `write_out` writes, and return its location."""
        if self._fd < 0 or self._written_bytes + len(self._pending) >= self._max_bytes:
            self._begin()
        piece = Piece(self._name, self._written_bytes + len(self._pending), len(record))
        self._pending += record
        return piece

    def _begin(self) -> None:
        """Write out and close the current file, and create the next one."""
        self.write_out()
        self.close()
        self._number += 1
        self._name, self._written_bytes = f"{self._writer}-{self._number:06d}.seg", 0
        with disk_errors(self._folder / self._name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._folder / self._name, flags, 0o644)
            _sync_folder(self._folder)

    def write_out(self) -> None:
        """Write buffered records to the file, so that readers see them and a `SegmentTable` can sync them."""
        while self._pending:
            with disk_errors(self._folder):
                count = os.write(self._fd, self._pending)
            self._written_bytes += count
            del self._pending[:count]

    def close(self) -> None:
        """Close the file, and discard the buffered records."""
        self._pending.clear()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class SegmentTable:
    """Owner of the tables segments (files and their committed lengths) and pieces (references into the files).

    Attributes:
        unused: names of the files that `remove_unused` will delete.
    """

    def __init__(self, folder: Path, db: sqlite3.Connection) -> None:
        """Create the owner of the tables in `db`.

        Args:
            folder: the run folder.
        """
        self._folder = folder / FOLDER
        self._db = db
        self._numbers: dict[str, int] = {}
        """File -> its key in the table segments."""
        self._last: dict[str, str] = {}
        """Writer -> its newest referenced file, the only one that may grow."""
        self._ends: dict[str, int] = {}
        """File -> end of its last piece, for files with uncommitted pieces."""
        self.unused: list[str] = []

    def open(self) -> int:
        """Remove the bytes that earlier writers did not commit, and return their number.

        Raises:
            UserError: a referenced file is missing or truncated.
        """
        with disk_errors(self._folder, UserError):
            self._folder.mkdir(exist_ok=True)
        return self._truncate_uncommitted(lambda name: True, UserError)

    def retire(self, writer: str) -> int:
        """Remove the bytes that an exited writer did not report, and return their number. Call inside a transaction.

        Raises:
            RunError: reported bytes are missing.
        """
        self._last.pop(writer, None)
        return self._truncate_uncommitted(lambda name: writer_of(name) == writer, RunError)

    def _truncate_uncommitted(self, selected: Callable[[str], bool], error: type[RlsysError]) -> int:
        """Truncate segment files to their referenced lengths, and delete files without references.

        Args:
            selected: returns whether the file with this name is processed.
            error: type of the error if a referenced file is missing or too short.

        Returns:
            the number of removed bytes.
        """
        rows = self._db.execute("SELECT name, length FROM segments").fetchall()
        lengths = {name: max(length, self._ends.get(name, 0)) for name, length in rows if selected(name)}
        with disk_errors(self._folder, error):
            entries = (
                entry for entry in os.scandir(self._folder) if not entry.is_dir() and selected(entry.name)
            )
            sizes = {entry.name: entry.stat().st_size for entry in entries}
            for name, length in lengths.items():
                if sizes.get(name, -1) < length:
                    actual = f"has {sizes[name]} bytes" if name in sizes else "is missing"
                    raise error(
                        f"{self._folder / name}: the file {actual}, expected at least {length} bytes; restore it"
                    )
                if sizes[name] > length:
                    os.truncate(self._folder / name, length)
            for name in sizes.keys() - lengths.keys() - set(self.unused):
                os.unlink(self._folder / name)
        return sum(size - lengths.get(name, 0) for name, size in sizes.items() if name not in self.unused)

    def add_pieces(self, locations: Iterable[tuple[int, int, Iterable[Piece]]]) -> None:
        """Add references to new pieces. Call inside a transaction.

        Args:
            locations: (sample id, sequence, new pieces) of each sequence.
        """
        rows: list[tuple[int, int, int, int, int]] = []
        for sample_id, sequence, pieces in locations:
            for name, offset, length in pieces:
                if name not in self._numbers:
                    self._insert(rows)  # before `_begin`, which deletes files without references
                    rows = []
                    self._begin(name)
                rows.append((sample_id, sequence, self._numbers[name], offset, length))
                self._ends[name] = max(self._ends.get(name, 0), offset + length)
        self._insert(rows)

    def _insert(self, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
        insert = "INSERT INTO pieces (sample_id, sequence, segment, start, length) VALUES (?, ?, ?, ?, ?)"
        self._db.executemany(insert, rows)

    def _begin(self, name: str) -> None:
        """Add a file to the table, and forget unused ones."""
        number = self._db.execute("INSERT INTO segments (name, length) VALUES (?, 0)", (name,)).lastrowid
        assert number is not None
        self._numbers[name] = number
        self._last[writer_of(name)] = name
        self.forget_unused()  # the files of dropped groups should not wait for the next checkpoint

    def sync(self) -> None:
        """Sync all referenced bytes to disk, and store the new lengths.

        Call inside a transaction, after `write_out` and before COMMIT.
        """
        for name, end in self._ends.items():
            with disk_errors(self._folder / name):
                _sync_file(self._folder / name)
            self._db.execute("UPDATE segments SET length = ? WHERE name = ?", (end, name))
        self._ends.clear()

    def forget_unused(self) -> None:
        """Remove files without references that no longer grow from the table, and add them to `unused`.

        Call inside a transaction.
        """
        unused = (
            "SELECT name FROM segments "
            "WHERE NOT EXISTS (SELECT 1 FROM pieces WHERE pieces.segment = segments.segment)"
        )
        growing = set(self._last.values())
        for (name,) in self._db.execute(unused).fetchall():
            if name not in growing:
                self._db.execute("DELETE FROM segments WHERE name = ?", (name,))
                self._numbers.pop(name, None)
                self._ends.pop(name, None)
                self.unused.append(name)

    def remove_unused(self) -> None:
        """Delete the files in `unused`. Call after the COMMIT that removed them from the table."""
        while self.unused:
            with disk_errors(self._folder / self.unused[-1]):
                (self._folder / self.unused.pop()).unlink(missing_ok=True)


def writer_of(name: str) -> str:
    """Return the writer's name in the name of a segment file, WRITER-NUMBER.seg."""
    return name.rpartition("-")[0]


def _sync_file(path: Path) -> None:
    """Sync a file to disk, including bytes that other processes wrote."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a new file's name survives a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
