"""RunReader: read access to the ledger and the tokens of a run folder, for all readers outside the rollout process.

On a local disk it reads the file, also while the run is live. On a shared file system a live run locks the file
exclusively, because SQLite's WAL supports the processes of one machine only; there the reader queries the run's
coordinator.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import RunError, UserError
from rlsys.core.messages import decode
from rlsys.core.types import SampleGroup, Status
from rlsys.ledger.ledger import Ledger, read_ledger
from rlsys.ledger.samples import SampleQuery, SamplesAnswer, SampleView, check_query, find_samples, last_step
from rlsys.ledger.store import FILE_NAME, blob_to_ids, open_readonly, read_groups
from rlsys.obs.coordinator import CoordinatorUnreachable, query_coordinator
from rlsys.obs.filesystem import is_local
from rlsys.obs.token_records import TokenRecord, read_floats, read_records
from rlsys.segments.records import SegmentReader


class Length(NamedTuple):
    """Length of a response.

    Attributes:
        tokens: number of response tokens.
        complete: whether the response has ended.
        prompt: number of prompt tokens; None if unknown, for example after several prefills.
    """

    tokens: int
    complete: bool
    prompt: int | None


class RunReader:
    """Reader of one run folder. It keeps no file open between calls."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def status(self) -> dict[str, Any] | None:
        """Return the status of the run's coordinator; None if the run is not live.

        Raises:
            CoordinatorUnreachable: the coordinator does not respond, or another process has its port.
        """
        body = query_coordinator(self._run_dir, "status")
        if not body:
            return None
        with _decode_errors():
            status = json.loads(body)
            if not isinstance(status, dict):
                raise ValueError
        return status

    def ledger(self) -> Ledger:
        """Return the counts of the run: from the coordinator of a live run, or else from the file.

        Raises:
            UserError: there is no ledger, or it is damaged.
            CoordinatorUnreachable: the coordinator does not respond, and the file is on a shared file system.
        """
        try:
            if body := query_coordinator(self._run_dir, "ledger"):
                with _decode_errors():
                    return decode(body, Ledger)
        except CoordinatorUnreachable:
            if not is_local(self._run_dir):
                raise
        with self.database() as db:
            return read_ledger(db)

    def groups(self, condition: str, *values: object) -> list[SampleGroup]:
        """Return the groups that fulfil an SQL condition, with all tokens, ordered by id.

        Args:
            condition: condition on the table groups, with a placeholder `?` for each value.

        Raises:
            UserError: there is no ledger, or the ledger or a segment is damaged.
        """
        try:
            with self.database() as db, SegmentReader(self._run_dir) as segments:
                groups = read_groups(db, condition, *values)
                for group in groups:
                    group.samples = [segments.load(sample) for sample in group.samples]
                return groups
        except RunError as e:
            raise UserError(str(e)) from None

    def lengths(self) -> list[list[Length]]:
        """Return the length of each sample that has tokens: a list for each group, ordered by group id.

        Raises:
            UserError: there is no ledger, or it is damaged.
        """

        def to_length(row: tuple[Any, ...]) -> Length:
            _, tokens, status, prefilled, resumes = row
            prompt = None if resumes or not prefilled else int(prefilled)
            return Length(int(tokens), status in (Status.FINISHED, Status.TRUNCATED), prompt)

        with self.database() as db:
            rows = db.execute(
                "SELECT group_id, tokens, status, prefilled_tokens, resumes FROM samples WHERE tokens > 0 "
                "ORDER BY group_id, place"
            )
            return [[to_length(row) for row in group] for _, group in groupby(rows, key=lambda row: row[0])]

    def samples(self, query: SampleQuery) -> list[SampleView]:
        """Return one page of samples, with the values that the trainer logged for them.

        On a local disk, the page shows the last commit.

        Raises:
            UserError: the query is invalid, its step, group or sample does not exist, or there is no usable ledger.
            CoordinatorUnreachable: the coordinator does not respond, and the file is on a shared file system.
        """
        check_query(query)
        views = self._from_coordinator(query) if not is_local(self._run_dir) else None
        if views is None:
            try:
                with self.database() as db, SegmentReader(self._run_dir) as segments:
                    views = find_samples(db, segments, query)
            except RunError as e:
                raise UserError(str(e)) from None
        steps = {view.train_step for view in views if view.train_step is not None}
        training_log = {step: read_records(self._run_dir, step) for step in steps}
        for view in views:
            if view.train_step is not None:
                add_training_log(view, training_log[view.train_step].get(view.sample.sample_id))
        return views

    def _from_coordinator(self, query: SampleQuery) -> list[SampleView] | None:
        """Return one page of samples from the coordinator; None if the run is not live.

        Raises:
            UserError: the coordinator rejects the query.
            CoordinatorUnreachable: the coordinator does not respond, or another process has its port.
        """
        body = query_coordinator(self._run_dir, "samples", query=msgspec.json.encode(query))
        if not body:
            return None
        with _decode_errors():
            answer = decode(body, SamplesAnswer)
        if answer.error:
            raise UserError(answer.error)
        return answer.samples

    def last_step(self) -> int:
        """Return the number of the last train step whose samples can be read; 0 before the first step."""
        if not is_local(self._run_dir) and (status := self.status()) is not None:
            return int(status["train_step"])
        with self.database() as db:
            return last_step(db)

    @contextlib.contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        """Provide a read-only connection to the ledger's file, in one transaction.

        The file of a live run must be on a local disk.

        Raises:
            UserError: there is no ledger, or it is damaged.
        """
        path = self._run_dir / FILE_NAME
        with contextlib.ExitStack() as stack:
            if _needs_recovery(path):
                path = _copy(path, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            db = stack.enter_context(contextlib.closing(open_readonly(path)))
            try:
                db.execute("BEGIN")  # a snapshot: later commits of a live writer are invisible
                yield db
            except (sqlite3.Error, KeyError, ValueError, TypeError) as e:  # a damaged page, counter or row
                raise UserError(
                    f"{self._run_dir / FILE_NAME}: not a usable ledger: {type(e).__name__}: {e}"
                ) from None


def add_training_log(view: SampleView, logged: TokenRecord | None) -> None:
    """Add the values that the trainer logged for a sample, and the tokens if the ledger has deleted them.

    Args:
        view: the sample, changed in place.
        logged: the trainer's record of the sample; None: none, nothing is added.
    """
    if logged is None:
        return
    if not view.has_tokens:
        view.sample.response_ids = token_ids(blob_to_ids(logged.ids))
        view.sample.mu = log_probs(read_floats(logged.mu))
    view.logp, view.advantages = read_floats(logged.logp), read_floats(logged.advantages)


@contextlib.contextmanager
def _decode_errors() -> Iterator[None]:
    """Convert errors of decoding a response to CoordinatorUnreachable, because another process sent the response."""
    try:
        yield
    except (ValueError, msgspec.DecodeError):
        raise CoordinatorUnreachable("the process on the coordinator's port is not a coordinator") from None


def _needs_recovery(path: Path) -> bool:
    """Return whether a killed writer left a journal that a read-only connection cannot process."""
    journal, wal = (path.with_name(path.name + suffix) for suffix in ("-journal", "-wal"))
    return _is_nonempty(journal) or (_is_nonempty(wal) and not is_local(path))


def _is_nonempty(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _copy(path: Path, folder: Path) -> Path:
    """Copy the ledger with its journals to `folder`, recover the copy from them, and return its path."""
    for suffix in ("-journal", "-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(path.with_name(path.name + suffix), folder)
    copy = folder / path.name
    with contextlib.closing(sqlite3.connect(copy)) as db, contextlib.suppress(sqlite3.Error):
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the first read recovers the copy
    return copy
