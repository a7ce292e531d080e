"""The one writer of a rollouts.sqlite and its segments: its connection, its lock, and one open transaction over many
small writes."""

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
from rlsys.core.types import Sample
from rlsys.ledger.route_files import RouteFiles
from rlsys.ledger.samples import SampleQuery, Seen, find_samples
from rlsys.ledger.segments import SegmentFile, SegmentTable
from rlsys.ledger.store import WriterLock, is_shared, open_readonly, open_store, sqlite_errors
from rlsys.ledger.takeover import take_over
from rlsys.segments.records import FOLDER, SegmentReader

T = TypeVar("T")

_GOING = "going"
"""Key in the table meta: names of the files that the last commit with such took away."""

_WRITERS = "writers"
"""The same: how many processes have written segments."""

log = logging.getLogger("rlsys.rollout")


class StoreWriter:
    """Opens `path`, or creates it. Raises UserError: the file is in use, damaged, foreign or another run's.

    `owner`: the launch that writes; None where no other process can know the file. Every transaction begins and ends
    with a look at who owns the run: locks keep two writers apart on one machine, the epoch does where locks do not
    reach. A writer whose launch lost the run raises FencedError and leaves the file as it was committed last. What
    one commits that was stopped between its last look and the commit: takeover.py.

    What `writing` blocks wrote is on disk after `flush`. A block or a flush that fails leaves memory ahead of the
    file: nothing is written after it, and the file stays as it was committed last.
    """

    def __init__(self, path: Path, identity: str, largest_group: int, owner: Owner | None = None) -> None:
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
        self._broken = ""
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
        with self.writing():
            if self._owner is not None:
                self.set_counter("owner_epoch", self._owner.epoch)
            self._remove_rest()
            if torn := self.segments.open():
                self._count_torn(torn)
                log.warning("%s: %d bytes that no commit names were left behind", self.path, torn)
            self.routes.open()
            tokens = SegmentFile(self.path.parent, self.new_writer())
        self._commit()
        return tokens

    def new_writer(self) -> str:
        """A name for one who writes segments, that nobody had before."""
        with self.writing():
            row = self.db.execute("SELECT value FROM meta WHERE key = ?", (_WRITERS,)).fetchone()
            number = 1 + (int(row[0]) if row else 0)
            self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_WRITERS, number))
        return f"{self._epoch:06d}-{number:06d}"

    def _remove_rest(self) -> None:
        """Files that went with the last commit, but for a kill: what is torn of them has been counted."""
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (_GOING,)).fetchone()
        wanted = {
            name
            for (name,) in self.db.execute("SELECT name FROM segments UNION SELECT name FROM route_files")
        }
        for name in set(json.loads(row[0]) if row else ()) - wanted:
            with disk_errors(self.path.parent / FOLDER / name, UserError):
                (self.path.parent / FOLDER / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """All of a block's writes, or none."""
        if self._broken:
            raise RunError(self._broken)
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
            self._close_to_writes(e)
            if self.db.in_transaction:
                self.db.execute("ROLLBACK TO method")
            raise

    def _check_owner(self) -> None:
        """Inside a transaction, so that nobody else can change the answer before it ends."""
        if self._owner is None:
            return
        self._owner.check()
        if (newest := self.counter("owner_epoch")) > self._owner.epoch:
            raise FencedError(
                f"{self.path}: launch {newest} writes this file; launch {self._owner.epoch} is over"
            )

    def _close_to_writes(self, error: BaseException) -> None:
        self._broken = f"{self.path}: closed to writes after: {error}"

    def forget_unused(self) -> None:
        """Inside a `writing` block: files that no row points into go after the commit."""
        self.segments.forget_unused()
        self._count_torn(self.routes.forget_unused())

    def _count_torn(self, torn: int) -> None:
        if torn:
            self.set_counter("torn_bytes", self.counter("torn_bytes") + torn)

    def retire(self, writer: str) -> None:
        """A process that wrote segments is gone: what it had not told is cut off and counted."""
        with self.writing():
            self._count_torn(self.segments.retire(writer))

    def load(self, samples: Iterable[Sample]) -> list[Sample]:
        """The same with their tokens in hand, what is not flushed included."""
        self.tokens.write_out()
        with SegmentReader(self.path.parent) as reader:
            return [reader.loaded(sample) for sample in samples]

    def samples(self, query: SampleQuery) -> list[Seen]:
        """A page of them, what is not flushed included."""
        with sqlite_errors(self.path):
            self.tokens.write_out()
            with SegmentReader(self.path.parent) as segments:
                return find_samples(self.db, segments, query)

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """What a query finds in the file, what is not flushed included."""
        with sqlite_errors(self.path):
            return query(self.db)

    async def read_committed(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """What a query finds as of the last commit. A long one does not stop the loop, where a second connection is
        allowed: not on a shared file system."""
        if is_shared(self.path):
            return self.read(query)

        def beside() -> T:
            with sqlite_errors(self.path), contextlib.closing(open_readonly(self.path)) as db:
                db.execute("BEGIN")  # what is committed between two statements is in neither
                return query(db)

        return await asyncio.to_thread(beside)

    def counter(self, key: str) -> int:
        """Of the table meta."""
        query = "SELECT value FROM meta WHERE key = ?"
        return int(self.read(lambda db: db.execute(query, (key,)).fetchone()[0]))

    def set_counter(self, key: str, value: int) -> None:
        """Inside a `writing` block."""
        self.db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))

    def flush(self) -> None:
        """Commit: on disk when this returns. A commit that fails is not tried again: SQLite may have undone it."""
        if self.db.in_transaction:
            self._commit(self.tokens.write_out)

    def _commit(self, before: Callable[[], None] = lambda: None) -> None:
        with sqlite_errors(self.path):
            try:
                before()
                self.segments.sync()
                self.routes.sync()
                if going := [*self.segments.unused, *self.routes.unused]:
                    self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_GOING, json.dumps(going)))
                if self._owner is not None:
                    self._owner.check()
                self.db.execute("COMMIT")
                if self._owner is not None and (self.segments.unused or self.routes.unused):
                    self._owner.check()  # a later launch may count on them: its ledger may not have this commit
                self.segments.remove()
                self.routes.remove()
            except BaseException as e:
                self._close_to_writes(e)
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
