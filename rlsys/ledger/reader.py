"""RunReader: what a run folder says of its tokens, to those who change nothing. It alone knows where they lie.

While a run lives its coordinator is asked, because nobody else may have the file open: on a shared file system the
coordinator holds it for itself, and SQLite's WAL is for the processes of one machine. Once it has ended, the file.
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
from rlsys.ledger.ledger import Ledger, count
from rlsys.ledger.samples import SampleQuery, SamplesAnswer, Seen, check_query, find_samples, last_step
from rlsys.ledger.store import FILE_NAME, blob_to_ids, open_readonly, read_groups
from rlsys.obs.coordinator import CoordinatorUnreachable, query_coordinator
from rlsys.obs.filesystem import is_local
from rlsys.obs.token_records import TokenRecord, read_floats, read_records
from rlsys.segments.records import SegmentReader


class Length(NamedTuple):
    """Of a response, in tokens. `ended`: by itself or at the limit; else it would have become longer. `prompt`: None
    where it is not known, as of one that was read more than once."""

    tokens: int
    ended: bool
    prompt: int | None


class RunReader:
    """Of one run folder; holds nothing open between calls."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def status(self) -> dict[str, Any] | None:
        """What the live coordinator says of itself; None when there is none.

        Raises CoordinatorUnreachable: it does not answer, or not with a status.
        """
        body = query_coordinator(self._run_dir, "status")
        if not body:
            return None
        with _understood():
            status = json.loads(body)
            if not isinstance(status, dict):
                raise ValueError
        return status

    def ledger(self) -> Ledger:
        """Of a live run as its coordinator counts it, else from the file.

        Raises UserError: there is none, or it is damaged; CoordinatorUnreachable: the coordinator does not answer,
        and no other process may look into its file.
        """
        try:
            if body := query_coordinator(self._run_dir, "ledger"):
                with _understood():
                    return decode(body, Ledger)
        except CoordinatorUnreachable:
            if not is_local(self._run_dir):
                raise
        with self.database() as db:
            return count(db)

    def groups(self, where: str, *values: object) -> list[SampleGroup]:
        """Whole groups with their tokens, by id, of a run as `database` takes it. Raises UserError."""
        try:
            with self.database() as db, SegmentReader(self._run_dir) as segments:
                groups = read_groups(db, where, *values)
                for group in groups:
                    group.samples = [segments.loaded(sample) for sample in group.samples]
                return groups
        except RunError as e:
            raise UserError(str(e)) from None

    def lengths(self) -> list[list[Length]]:
        """Of every sample that has begun, by group, in the order of the groups. Raises UserError."""
        ended = Status.FINISHED, Status.TRUNCATED
        with self.database() as db:
            found = db.execute(
                "SELECT group_id, tokens, status, prefilled_tokens, resumes FROM samples WHERE tokens > 0 "
                "ORDER BY group_id, place"
            )
            return [
                [
                    Length(int(n), s in ended, None if again or not read else int(read))
                    for _, n, s, read, again in group
                ]
                for _, group in groupby(found, key=lambda row: row[0])
            ]

    def samples(self, query: SampleQuery) -> list[Seen]:
        """One page of them. On a local disk as of the writer's last commit, also while the run lives.

        Raises UserError: a value that cannot be, no such step, group or sample, or no usable file;
        CoordinatorUnreachable: as for `ledger`.
        """
        check_query(query)
        found = self._from_coordinator(query) if not is_local(self._run_dir) else None
        if found is None:
            try:
                with self.database() as db, SegmentReader(self._run_dir) as segments:
                    found = find_samples(db, segments, query)
            except RunError as e:
                raise UserError(str(e)) from None
        steps = {seen.train_step for seen in found if seen.train_step is not None}
        figures = {step: read_records(self._run_dir, step) for step in steps}
        for seen in found:
            if seen.train_step is not None:
                add_kept(seen, figures[seen.train_step].get(seen.sample.sample_id))
        return found

    def _from_coordinator(self, query: SampleQuery) -> list[Seen] | None:
        """None: the run has none."""
        body = query_coordinator(self._run_dir, "samples", query=msgspec.json.encode(query))
        if not body:
            return None
        with _understood():
            answer = decode(body, SamplesAnswer)
        if answer.error:
            raise UserError(answer.error)
        return answer.samples

    def last_step(self) -> int:
        """The last train step that took groups, of those whose samples can be asked for; 0 before the first."""
        if not is_local(self._run_dir) and (status := self.status()) is not None:
            return int(status["train_step"])
        with self.database() as db:
            return last_step(db)

    @contextlib.contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        """The file of a run that has ended, or, on a local disk, of one that lives; as of one commit.

        Raises UserError.
        """
        path = self._run_dir / FILE_NAME
        with contextlib.ExitStack() as stack:
            if _interrupted(path):
                path = _copy(path, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            db = stack.enter_context(contextlib.closing(open_readonly(path)))
            try:
                db.execute("BEGIN")  # what a live writer commits between two queries is in neither
                yield db
            except (sqlite3.Error, KeyError, ValueError, TypeError) as e:  # a page, a counter, a row not ours
                raise UserError(
                    f"{self._run_dir / FILE_NAME}: not a usable rollout file: {type(e).__name__}: {e}"
                ) from None


def add_kept(seen: Seen, figures: TokenRecord | None) -> None:
    """What the trainer wrote down of the sample; its tokens too, where the ledger has forgotten them."""
    if figures is None:
        return
    if not seen.kept:
        seen.sample.response_ids = token_ids(blob_to_ids(figures.ids))
        seen.sample.mu = log_probs(read_floats(figures.mu))
    seen.logp, seen.advantages = read_floats(figures.logp), read_floats(figures.advantages)


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """An answer that cannot be decoded is not the coordinator's: its port is another process's by now."""
    try:
        yield
    except (ValueError, msgspec.DecodeError):
        raise CoordinatorUnreachable("what answers in the place of its coordinator is none") from None


def _interrupted(path: Path) -> bool:
    """Whether the writer was killed in a transaction whose undoing, which a reader is not allowed, comes first."""
    journal, wal = (path.with_name(path.name + end) for end in ("-journal", "-wal"))
    return _filled(journal) or (_filled(wal) and not is_local(path))


def _filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _copy(path: Path, folder: Path) -> Path:
    """With what SQLite keeps beside it, to where it may be recovered."""
    for end in ("-journal", "-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(path.with_name(path.name + end), folder)
    copy = folder / path.name
    with contextlib.closing(sqlite3.connect(copy)) as db, contextlib.suppress(sqlite3.Error):
        db.execute(
            "SELECT count(*) FROM sqlite_master"
        ).fetchone()  # recovers; what fails is told by who reads
    return copy
