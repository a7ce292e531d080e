"""RouteFiles: the ledger's references to the route files, in which engines write routed experts, and their deletion.

An engine writes its files (rlsys/segments/route_records.py), and returns the location of a record with each response.
The transaction that saves a sample claims the records of its responses: it adds references, and syncs the files
before its COMMIT. The rollout process does not read the files. Records without a claim are ignored, and are counted
in torn_bytes when their file is deleted.

A file is deleted when no sample references it and its writer will not use it again: the engine was restarted, belongs
to an earlier launch, or has started two newer files. A late response may point into a deleted file. Its tokens then
have no routes, as after a crash of the engine.
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
    """Owner of the tables route_files and route_places. Methods raise RunError for disk errors.

    Attributes:
        unused: names of the files that `remove_unused` will delete.
    """

    def __init__(self, folder: Path, db: sqlite3.Connection, epoch: int) -> None:
        """Create the owner of the tables in `db`.

        Args:
            folder: the run folder.
            db: the ledger's connection.
            epoch: epoch of the launch that writes the ledger; 0 if it has no launch.
        """
        self._folder = folder / FOLDER
        self._db = db
        self._epoch = epoch
        self._unsynced: set[str] = set()
        self.unused: list[str] = []

    def open(self) -> None:
        """Check that all referenced files exist with all claimed bytes.

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
        """Claim the records of a sample's new spans. Call inside a transaction.

        Args:
            spans: the new spans.
            resent: whether some spans may be claimed already; their bytes are not counted again.

        Returns:
            the spans without those whose record is missing on disk.
        """
        return [
            span
            for span in spans
            if span.location is None
            or (resent and self._claimed(sample_id, span))
            or self._claim(sample_id, span)
        ]

    def _claimed(self, sample_id: int, span: RouteSpan) -> bool:
        """Return whether the sample has already claimed the record of a span."""
        assert span.location is not None
        name, offset, length, _ = span.location
        query = (
            "SELECT 1 FROM route_files JOIN route_places USING (file) "
            "WHERE sample_id = ? AND name = ? AND length >= ?"
        )
        return self._db.execute(query, (sample_id, name, offset + length)).fetchone() is not None

    def _claim(self, sample_id: int, span: RouteSpan) -> bool:
        """Claim the record of a span. Return False, with a warning, if the file does not contain it."""
        assert span.location is not None
        name, offset, length, _ = span.location
        with disk_errors(self._folder):
            size = file_size(self._folder / name)
        if size < offset + length:
            actual = f"has {size} bytes" if size >= 0 else "is missing"
            log.warning(
                "sample %d: no routed experts for positions %d to %d: the file %s %s; expected at least %d bytes",
                sample_id, span.start, span.end - 1, self._folder / name, actual, offset + length,
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
        """Sync all files with new claims to disk. Call before the COMMIT."""
        for name in self._unsynced:
            with disk_errors(self._folder / name):
                fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        self._unsynced.clear()

    def forget_unused(self) -> int:
        """Remove unused files from the tables, and add them to `unused`. Call inside a transaction.

        Returns:
            the number of their bytes that no sample claimed.
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
        """Return the files to which late responses cannot point any more."""
        newest_start: dict[tuple[int, str], int] = {}
        newest_number: dict[tuple[str, int], int] = {}
        for f in files:
            unit = f.epoch, f.unit
            process = f.folder, f.rank
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
        """Delete the files in `unused`. Call after the COMMIT that removed them from the tables."""
        while self.unused:
            path = self._folder / self.unused.pop()
            with disk_errors(path):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder has other files
                path.parent.rmdir()
