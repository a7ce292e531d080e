"""RouteFiles: the ledger's references to the files in which engines write routed experts, and their deletion.

Engines write the files (rlsys/segments/route_records.py); the rollout process does not read them. The transaction
that saves a sample claims the pointers of its responses, and the files are synced before its COMMIT. Records without
a claim are ignored, and are counted in torn_bytes when their file is deleted.
A file is deleted when no sample references it and its writer will not use it again: the engine was restarted, belongs
to an earlier launch, or has started two newer files. A late response may point into a deleted file; as after a crash
of the engine, its tokens then have no routes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Collection, Sequence
from pathlib import Path

from rlsys.core.errors import UserError, disk_errors
from rlsys.core.spans import RouteSpan
from rlsys.segments.records import FOLDER
from rlsys.segments.route_records import RouteFile, file_size

STILL_OPEN = 2
"""Number of newest files of a live process that are kept, because late responses may point into them."""

log = logging.getLogger("rlsys.rollout")


class RouteFiles:
    """Owns the tables route_files and route_places of `db`. Methods raise RunError for disk errors."""

    def __init__(self, folder: Path, db: sqlite3.Connection, epoch: int) -> None:
        """Create the references of a run.

        Args:
            folder: the run folder.
            db: the ledger's connection.
            epoch: epoch of the launch that writes; 0 without launches.
        """
        self._folder = folder / FOLDER
        self._db = db
        self._epoch = epoch
        self._unsynced: set[str] = set()
        self.unused: list[str] = []
        """Files without references, to be deleted by `remove_unused`."""

    def open(self) -> None:
        """Check that all referenced files are complete.

        Raises:
            UserError: a file is missing or truncated.
        """
        query = "SELECT name, length FROM route_files WHERE file IN (SELECT file FROM route_places)"
        for name, length in self._db.execute(query).fetchall():
            with disk_errors(self._folder, UserError):
                size = file_size(self._folder / name)
            if size < length:
                actual = f"has {size} bytes" if size >= 0 else "is missing"
                raise UserError(
                    f"{self._folder / name}: the file {actual}, expected at least {length} bytes; restore it"
                )

    def claim(self, sample_id: int, spans: Sequence[RouteSpan], *, resent: bool = False) -> list[RouteSpan]:
        """Add references to the files of a sample's new spans. Call inside a transaction.

        Args:
            spans: the new spans.
            resent: whether some spans may have been claimed before; these are not counted again.

        Returns:
            the spans whose experts are in memory or exist on disk.
        """
        return [
            span
            for span in spans
            if span.location is None
            or (resent and self._claimed(sample_id, span))
            or self._claim(sample_id, span)
        ]

    def _claimed(self, sample_id: int, span: RouteSpan) -> bool:
        assert span.location is not None
        name, offset, length, _ = span.location
        query = (
            "SELECT 1 FROM route_files JOIN route_places USING (file) "
            "WHERE sample_id = ? AND name = ? AND length >= ?"
        )
        return self._db.execute(query, (sample_id, name, offset + length)).fetchone() is not None

    def _claim(self, sample_id: int, span: RouteSpan) -> bool:
        assert span.location is not None
        name, offset, length, _ = span.location
        with disk_errors(self._folder):
            size = file_size(self._folder / name)
        if size < offset + length:
            log.warning(
                "sample %d: no routed experts of positions [%d, %d): %s has %d bytes, the record starts at byte %d",
                sample_id, span.start, span.end, self._folder / name, size, offset,
            )  # fmt: skip
            return False
        self._db.execute(
            "INSERT INTO route_files (name, claimed, length) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE "
            "SET claimed = claimed + excluded.claimed, length = max(length, excluded.length)",
            (name, length, offset + length),
        )
        self._db.execute(
            "INSERT INTO route_places SELECT ?, file FROM route_files WHERE name = ?", (sample_id, name)
        )
        self._unsynced.add(name)
        return True

    def sync(self) -> None:
        """Flush all claimed files to disk. Call before the COMMIT."""
        for name in self._unsynced:
            with disk_errors(self._folder / name):
                fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        self._unsynced.clear()

    def forget_unused(self) -> int:
        """Remove files without references from the table. Call inside a transaction; `remove_unused` deletes them.

        Returns:
            the number of bytes in them that were never claimed.
        """
        with disk_errors(self._folder):
            sizes = {
                file: entry.stat().st_size
                for folder in os.scandir(self._folder)
                if folder.is_dir()
                for entry in os.scandir(folder)
                if (file := RouteFile.of(f"{folder.name}/{entry.name}")) is not None
            }
        query = "SELECT name FROM route_files WHERE file IN (SELECT file FROM route_places)"
        referenced = {row[0] for row in self._db.execute(query)}
        unused = [f for f in self._complete_files(sizes) if f.name not in referenced]
        torn = 0
        for file in unused:
            row = self._db.execute("SELECT claimed FROM route_files WHERE name = ?", (file.name,)).fetchone()
            torn += sizes[file] - (row[0] if row else 0)
            self._db.execute("DELETE FROM route_files WHERE name = ?", (file.name,))
        self.unused += [file.name for file in unused]
        return torn

    def _complete_files(self, files: Collection[RouteFile]) -> set[RouteFile]:
        """Return the files that their writers will not use again."""
        newest_start: dict[tuple[int, str], int] = {}
        newest_number: dict[tuple[str, int], int] = {}
        for f in files:
            unit, process = (f.epoch, f.unit), (f.folder, f.rank)
            newest_start[unit] = max(newest_start.get(unit, 0), f.start)
            newest_number[process] = max(newest_number.get(process, 0), f.number)
        return {
            f
            for f in files
            if f.epoch < self._epoch
            or f.start < newest_start[f.epoch, f.unit]
            or f.number <= newest_number[f.folder, f.rank] - STILL_OPEN
        }

    def remove_unused(self) -> None:
        """Delete the files that `forget_unused` removed from the table. Call after the COMMIT."""
        while self.unused:
            path = self._folder / self.unused.pop()
            with disk_errors(path):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or a writer has just created a file in it
                path.parent.rmdir()
