"""StoreWriter: the only writer of a rollouts.sqlite and its segments. It commits many small writes together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rlsys.core.errors import RlsysError, RunError, UserError, disk_errors
from rlsys.core.owner import FencedError, Owner
from rlsys.core.types import AnySequence
from rlsys.ledger.route_files import RouteFiles
from rlsys.ledger.samples import SampleQuery, SampleView, find_samples
from rlsys.ledger.segments import SegmentFile, SegmentTable
from rlsys.ledger.store import WriterLock, is_shared, open_readonly, open_store, sqlite_errors
from rlsys.ledger.takeover import take_over
from rlsys.segments.records import FOLDER, SegmentReader

T = TypeVar("T")

_DELETED_FILES_KEY = "going"
"""Key in the table meta: names of the segments that the writer deletes after this commit."""

_WRITERS_KEY = "writers"
"""Key in the table meta: number of names that `new_writer` has issued."""

log = logging.getLogger("rlsys.rollout")


class StoreWriter:
    """Owner of the connection, the lock and the open transaction of a ledger file.

    A lock excludes a second writer on the same machine. Where locks are not reliable, the launch's epoch does: each
    transaction starts and ends with a check of the run's owner, which raises FencedError in a launch that was
    replaced. takeover.py handles a writer that is suspended between the last check and the commit.

    Changes in `writing` blocks are on disk after `flush`. After a failed block or flush, memory may have changes that
    the file lacks. The writer then refuses all further writes, and the file keeps its last commit.
    """

    def __init__(self, path: Path, identity: str, largest_group: int, owner: Owner | None = None) -> None:
        """Open the ledger, or create it, and remove what earlier writers did not commit.

        Args:
            path: the ledger's file.
            identity: hash of the config fields that determine rollouts.
            largest_group: maximum number of samples of a group.
            owner: the launch that writes; None if no other process can know the file.

        Raises:
            UserError: the file is in use, damaged, not one of rlsys, or belongs to another run.
        """
        self.path = path
        self._owner = owner
        self._lock = WriterLock(path)
        try:
            if owner is not None:
                take_over(path, owner.epoch)
            self.db = open_store(path, identity, largest_group)
        except RlsysError:
            self._lock.release()
            raise
        self._write_error = ""
        self._epoch = 0 if owner is None else owner.epoch
        self.segments = SegmentTable(path.parent, self.db)
        self.routes = RouteFiles(path.parent, self.db, self._epoch)
        try:
            self.tokens = self._take_over()
        except RlsysError:
            self.db.close()
            self._lock.release()
            raise

    def _take_over(self) -> SegmentFile:
        """Remove the files and bytes that earlier writers did not commit, and return a new segment file."""
        with self.writing():
            if self._owner is not None:
                self.set_counter("owner_epoch", self._owner.epoch)
            self._remove_deleted_files()
            if torn := self.segments.open():
                self._count_torn(torn)
                log.warning("%s: removed %d bytes of segments that were not committed", self.path, torn)
            self.routes.open()
            tokens = SegmentFile(self.path.parent, self.new_writer())
        self._commit()
        return tokens

    def new_writer(self) -> str:
        """Return a unique name for a process that writes segments."""
        with self.writing():
            row = self.db.execute("SELECT value FROM meta WHERE key = ?", (_WRITERS_KEY,)).fetchone()
            number = 1 + (int(row[0]) if row else 0)
            self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_WRITERS_KEY, number))
        return f"{self._epoch:06d}-{number:06d}"

    def _remove_deleted_files(self) -> None:
        """Delete the files whose deletion an earlier writer committed but did not execute.

        Their torn bytes are already counted.
        """
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (_DELETED_FILES_KEY,)).fetchone()
        referenced = {
            name
            for (name,) in self.db.execute("SELECT name FROM segments UNION SELECT name FROM route_files")
        }
        for name in set(json.loads(row[0]) if row else ()) - referenced:
            with disk_errors(self.path.parent / FOLDER / name, UserError):
                (self.path.parent / FOLDER / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Run the block in the open transaction, or in a new one, and undo its changes if it fails.

        Raises:
            RunError: a write failed, in this block or earlier.
            FencedError: another launch owns the run.
        """
        if self._write_error:
            raise RunError(self._write_error)
        try:
            with sqlite_errors(self.path):
                if not self.db.in_transaction:
                    self.db.execute("BEGIN IMMEDIATE")
                    self.db.execute("SAVEPOINT method")
                    self._check_owner()
                else:
                    self.db.execute("SAVEPOINT method")
                yield
                self.db.execute("RELEASE method")
        except BaseException as e:
            self._refuse_writes(e)
            if self.db.in_transaction:
                self.db.execute("ROLLBACK TO method")
            raise

    def _check_owner(self) -> None:
        """Check that this launch still owns the run.

        Call inside a transaction, because another launch cannot take over the file before its end.

        Raises:
            FencedError: another launch owns the run.
        """
        if self._owner is None:
            return
        self._owner.check()
        if (newest := self.counter("owner_epoch")) > self._owner.epoch:
            raise FencedError(
                f"{self.path}: launch {newest} owns this file; launch {self._owner.epoch} was replaced"
            )

    def _refuse_writes(self, error: BaseException) -> None:
        self._write_error = f"{self.path}: writes are refused after an error: {error}"

    def forget_unused(self) -> None:
        """Mark unused files for deletion after the commit. Call inside a `writing` block."""
        self.segments.forget_unused()
        self._count_torn(self.routes.forget_unused())

    def _count_torn(self, torn: int) -> None:
        if torn:
            self.set_counter("torn_bytes", self.counter("torn_bytes") + torn)

    def retire(self, writer: str) -> None:
        """Remove the bytes that an exited process wrote but did not report from its segments; count them as torn."""
        with self.writing():
            self._count_torn(self.segments.retire(writer))

    def load(self, samples: Iterable[AnySequence]) -> list[AnySequence]:
        """Return copies of samples or sequences that hold their tokens, including tokens that are not flushed."""
        self.tokens.write_out()
        with SegmentReader(self.path.parent) as reader:
            return [reader.load(sample) for sample in samples]

    def samples(self, query: SampleQuery) -> list[SampleView]:
        """Return one page of samples, including changes that are not flushed (see find_samples)."""
        with sqlite_errors(self.path):
            self.tokens.write_out()
            with SegmentReader(self.path.parent) as segments:
                return find_samples(self.db, segments, query)

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query on the file, including changes that are not flushed."""
        with sqlite_errors(self.path):
            return query(self.db)

    async def read_committed(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query on the last commit, in a thread with its own connection.

        On a shared file system the query runs on the writer's connection and includes changes that are not flushed.
        """
        if is_shared(self.path):
            return self.read(query)

        def query_snapshot() -> T:
            with sqlite_errors(self.path), contextlib.closing(open_readonly(self.path)) as db:
                db.execute("BEGIN")  # a snapshot: later commits are invisible
                return query(db)

        return await asyncio.to_thread(query_snapshot)

    def counter(self, key: str) -> int:
        """Return the counter `key` of the table meta."""
        query = "SELECT value FROM meta WHERE key = ?"
        return int(self.read(lambda db: db.execute(query, (key,)).fetchone()[0]))

    def set_counter(self, key: str, value: int) -> None:
        """Set the counter `key` of the table meta. Call inside a `writing` block."""
        self.db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))

    def flush(self) -> None:
        """Commit the open transaction to disk. If this fails, later calls of `writing` fail.

        Raises:
            RunError: a write failed.
            FencedError: another launch owns the run.
        """
        if self.db.in_transaction:
            self._commit(self.tokens.write_out)

    def _commit(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Sync the segments, commit, and delete the unused files.

        A failed commit is not repeated, because SQLite may have rolled the transaction back.

        Args:
            prepare: called first; writes buffered records.
        """
        with sqlite_errors(self.path):
            try:
                prepare()
                self.segments.sync()
                self.routes.sync()
                if deleted := [*self.segments.unused, *self.routes.unused]:
                    self.db.execute(
                        "INSERT OR REPLACE INTO meta VALUES (?, ?)", (_DELETED_FILES_KEY, json.dumps(deleted))
                    )
                if self._owner is not None:
                    self._owner.check()
                self.db.execute("COMMIT")
                if self._owner is not None and (self.segments.unused or self.routes.unused):
                    self._owner.check()  # a newer launch may need the files, because its ledger may lack this commit
                self.segments.remove_unused()
                self.routes.remove_unused()
            except BaseException as e:
                self._refuse_writes(e)
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self.tokens.close()
            self.db.close()
            self._lock.release()
