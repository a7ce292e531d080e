"""What the ledger knows of the engines' own segments: which samples want which file, and when one may go.

Engines write these files (rlsys/segments/route_records.py) and the rollout process reads none of them. A pointer
that came with an answer is claimed in the transaction that saves the sample; the file is synced before its COMMIT.
What an engine wrote and nobody claimed is absent, and counted in torn_bytes when its file goes.

A file goes when no sample wants it and its writer is done with it: the engine has been started again since, or by a
later launch, or has begun two further files. A late answer that points into a file that is gone is like the answer of
an engine that died: these tokens have no routes.
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
from rlsys.segments.route_records import RouteFile, written_bytes

STILL_OPEN = 2
"""Of a living process's files, so many of the newest stay: it writes the last one, and answers are on their way."""

log = logging.getLogger("rlsys.rollout")


class RouteFiles:
    """Owns the tables route_files and route_places of `db`. Raises RunError for what the disk refuses."""

    def __init__(self, folder: Path, db: sqlite3.Connection, epoch: int) -> None:
        """`folder`: the run's. `epoch`: of the launch that writes, 0 where there is none."""
        self._folder = folder / FOLDER
        self._db = db
        self._epoch = epoch
        self._unsynced: set[str] = set()
        self.unused: list[str] = []
        """Files that nobody wants: `remove` deletes them."""

    def open(self) -> None:
        """Raises UserError when a file that a sample wants is not there, or not whole."""
        wanted = "SELECT name, length FROM route_files WHERE file IN (SELECT file FROM route_places)"
        for name, length in self._db.execute(wanted).fetchall():
            with disk_errors(self._folder, UserError):
                found = written_bytes(self._folder / name)
            if found < length:
                has = f"it has {found}" if found >= 0 else "it is not there"
                raise UserError(
                    f"{self._folder / name}: {length} bytes of it are in use, but {has}; restore it"
                )

    def claim(self, sample_id: int, spans: Sequence[RouteSpan], *, again: bool = False) -> list[RouteSpan]:
        """Inside a transaction: those of a sample's new spans that are in hand, or lie where they say. `again`: some
        are not new, and are not counted once more."""
        return [
            span
            for span in spans
            if span.location is None
            or (again and self._claimed(sample_id, span))
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
            found = written_bytes(self._folder / name)
        if found < offset + length:
            log.warning(
                "sample %d: no routes of positions [%d, %d): %s ends at %d bytes, and they lie at %d",
                sample_id, span.start, span.end, self._folder / name, found, offset,
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
        """What was claimed is on disk when this returns; the COMMIT may follow."""
        for name in self._unsynced:
            with disk_errors(self._folder / name):
                fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        self._unsynced.clear()

    def forget_unused(self) -> int:
        """Inside a transaction. Files that may go do so after the COMMIT: `remove`. Returns the bytes in them that
        nobody ever claimed."""
        with disk_errors(self._folder):
            sizes = {
                file: entry.stat().st_size
                for folder in os.scandir(self._folder)
                if folder.is_dir()
                for entry in os.scandir(folder)
                if (file := RouteFile.of(f"{folder.name}/{entry.name}")) is not None
            }
        wanted = "SELECT name FROM route_files WHERE file IN (SELECT file FROM route_places)"
        kept = {row[0] for row in self._db.execute(wanted)}
        gone = [f for f in self._finished(sizes) if f.name not in kept]
        torn = 0
        for file in gone:
            row = self._db.execute("SELECT claimed FROM route_files WHERE name = ?", (file.name,)).fetchone()
            torn += sizes[file] - (row[0] if row else 0)
            self._db.execute("DELETE FROM route_files WHERE name = ?", (file.name,))
        self.unused += [file.name for file in gone]
        return torn

    def _finished(self, files: Collection[RouteFile]) -> set[RouteFile]:
        """Those that their writers do not touch again."""
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

    def remove(self) -> None:
        """What `forget_unused` found. After the COMMIT."""
        while self.unused:
            path = self._folder / self.unused.pop()
            with disk_errors(path):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: other files of it are wanted, or to come
                path.parent.rmdir()
