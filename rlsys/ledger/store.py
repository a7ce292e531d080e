"""rollouts.sqlite: the schema, opening the file, and the conversion between rows and samples.

The tables have these rows:
    meta         one per counter (COUNTERS), one per note of another component, such as a planner, and the identity
    groups       one per issued group: its prompt, size, state, and rank in the order of completion
    samples      one per issued sample: status, lengths, reward; small rows, so that counting is cheap
    sequences    one per sequence of a sample after its first
    pieces       one per record in a segment (rlsys/segments/records.py), in the order of the records: ids, mu,
                 routes, masks, log-probs of trainer and teacher; deleted when no checkpoint can need the record
    segments     one per segment: name and committed length
    route_files  one per segment that an engine writes: name, bytes claimed by samples, end of the last claim
    route_places one per claim of a sample in a route file (route_files.py)
    takes        one per train step, the journal: the groups that the step took, the weight version, and `parts`, the
                 portions of the groups that the trainer had already received
    pushes       one per weight version: the number of train steps that its weights contain
    admissions   one per admission of a group, with the weight version
    interrupts   one per interruption of a sequence: its number of tokens, and the weight version

The columns of samples and sequences are the fields of sample_fields.py, and these columns of samples:
    prompt_ids   the prompt from which the sample was sampled, if it differs from the group's; with `own_prompt`, the
                 sample is also trained under it
    tokens       number of tokens of all sequences of the sample; other columns describe its first sequence

`PRAGMA synchronous=FULL` makes commits survive kill -9 and a power failure. On a local disk the journal is a WAL, so
readers on this machine never wait for the writer. On a shared file system, or one of unknown type, a WAL is unsafe,
because its index is shared memory of one machine. There the writer locks the file exclusively while it is open and
uses a rollback journal, and readers query the coordinator (reader.py). A lock file excludes a second writer. Where
file locks are not reliable, each launch works on its own copy (takeover.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.core.errors import RlsysError, RunError, UserError, disk_errors
from rlsys.core.spans import Piece
from rlsys.core.types import GroupState, Sample, SampleGroup, TokenSequence
from rlsys.ledger.sample_fields import (
    EXTRA_SEQUENCE_FIELDS,
    IDENTITY_FIELDS,
    SAMPLE_FIELDS,
    SEQUENCE_FIELDS,
    column_definitions,
    from_columns,
    to_columns,
)
from rlsys.obs.filesystem import is_local

FILE_NAME = "rollouts.sqlite"

_APPLICATION_ID = 0x726C7379  # "rlsy": marks the files of rlsys
_SCHEMA_VERSION = 17
_SAMPLE_COLUMNS = IDENTITY_FIELDS + SEQUENCE_FIELDS + SAMPLE_FIELDS
_SEQUENCE_COLUMNS = IDENTITY_FIELDS + EXTRA_SEQUENCE_FIELDS + SEQUENCE_FIELDS
_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    train_step INTEGER, ready_order INTEGER, prompt_ids BLOB NOT NULL, size INTEGER NOT NULL
);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_step ON groups (train_step);
CREATE TABLE samples (
    {column_definitions(_SAMPLE_COLUMNS)}, tokens INTEGER NOT NULL, prompt_ids BLOB,
    PRIMARY KEY (sample_id), FOREIGN KEY (group_id) REFERENCES groups
);
CREATE INDEX samples_by_group ON samples (group_id);
CREATE TABLE sequences (
    {column_definitions(_SEQUENCE_COLUMNS)}, prompt_ids BLOB NOT NULL,
    PRIMARY KEY (sample_id, sequence), FOREIGN KEY (sample_id) REFERENCES samples
) WITHOUT ROWID;
CREATE INDEX sequences_by_group ON sequences (group_id);
CREATE TABLE segments (segment INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, length INTEGER NOT NULL);
CREATE TABLE pieces (
    piece INTEGER PRIMARY KEY, sample_id INTEGER NOT NULL, sequence INTEGER NOT NULL,
    segment INTEGER NOT NULL REFERENCES segments, start INTEGER NOT NULL, length INTEGER NOT NULL
);
CREATE INDEX pieces_by_sample ON pieces (sample_id);
CREATE INDEX pieces_by_segment ON pieces (segment);
CREATE TABLE route_files (
    file INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, claimed INTEGER NOT NULL, length INTEGER NOT NULL
);
CREATE TABLE route_places (sample_id INTEGER NOT NULL, file INTEGER NOT NULL REFERENCES route_files);
CREATE INDEX route_places_by_sample ON route_places (sample_id);
CREATE INDEX route_places_by_file ON route_places (file);
CREATE TABLE takes (
    train_step INTEGER PRIMARY KEY, weight_version INTEGER NOT NULL, group_ids TEXT NOT NULL,
    parts TEXT NOT NULL
);
CREATE TABLE pushes (weight_version INTEGER PRIMARY KEY, train_step INTEGER NOT NULL);
CREATE TABLE admissions (
    place INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, weight_version INTEGER NOT NULL
);
CREATE TABLE interrupts (
    place INTEGER PRIMARY KEY, sample_id INTEGER NOT NULL, sequence INTEGER NOT NULL, tokens INTEGER NOT NULL,
    weight_version INTEGER NOT NULL
);
"""


COUNTERS = ("issued", "completed", "weight_version", "pruned_to", "lost", "torn_bytes", "owner_epoch")
"""Keys of monotonic counters in the table meta; they start at 0."""
READER_SECONDS = 1.0
"""Timeout in seconds of a reader on a locked file. It is short because a writer may hold its lock for days."""
FOREIGN_LOCK_SECONDS = 60.0
"""Timeout in seconds of a write while another program, such as a sqlite3 shell, locks the file."""


class WriterLock:
    """Lock that prevents a second process from writing to a ledger. It ends with the process.

    Raises:
        UserError: another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            self._fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with disk_errors(path):
                self._acquire(path)
        except RlsysError:
            os.close(self._fd)
            raise

    def _acquire(self, path: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise UserError(f"{path}: in use by process {owner}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Convert errors of SQLite, such as a full or read-only disk, to a RunError of one line."""
    try:
        yield
    except sqlite3.Error as e:
        raise RunError(f"{path}: cannot read or write: {e}") from None


def open_store(path: Path, identity: str, largest_group: int) -> sqlite3.Connection:
    """Open the ledger of this run for writing, or create it.

    Args:
        path: the file.
        identity: hash of the config fields that determine rollouts.
        largest_group: maximum number of samples of a group.

    Returns:
        a connection in autocommit mode.

    Raises:
        UserError: the file is not an SQLite file, is damaged, is not one of rlsys, has another schema, or has another
            identity. The file is not changed.
    """
    try:
        db = connect(path)
    except sqlite3.Error as e:
        raise UserError(f"{path}: cannot open: {e}") from None
    try:
        shared = is_shared(path)
        if shared:  # before the first read, so that a leftover WAL is read without shared memory
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
        new = is_new(db, path)
        if not new:
            check_format(db, path)
        set_journal(db, path, "truncate" if shared else "wal")
        if new:
            _create(db, identity, largest_group)
        else:
            _check_pages(db, path)
            _adopt(db, path, identity, largest_group)
        db.execute("PRAGMA synchronous=FULL")
    except sqlite3.Error as e:
        db.close()
        raise unusable(path, e) from None
    except UserError:
        db.close()
        raise
    return db


def is_shared(path: Path) -> bool:
    """Return whether another machine may have the file open."""
    return not is_local(path)


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection in autocommit mode, for use by one thread at a time."""
    # A large file takes minutes to open, so the thread that opens it is not the one that uses it.
    return sqlite3.connect(path, isolation_level=None, timeout=FOREIGN_LOCK_SECONDS, check_same_thread=False)


def unusable(path: Path, error: sqlite3.Error) -> UserError:
    """Return the UserError for an SQLite error while the file is opened."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
        return UserError(
            f"{path}: another process has locked the file for more than {FOREIGN_LOCK_SECONDS:g} s"
        )
    return UserError(f"{path}: not a usable ledger: {error}; move it away or restore it")


def set_journal(db: sqlite3.Connection, path: Path, mode: str) -> None:
    """Set the journal mode of a file, which may have another mode if it was copied from another file system.

    Args:
        mode: "wal" or "truncate"; the latter also locks the file exclusively.

    Raises:
        UserError: the file system does not support the mode.
    """
    actual = str(db.execute(f"PRAGMA journal_mode={mode}").fetchone()[0])
    if actual != mode:
        raise UserError(
            f"{path}: the journal mode stays {actual}; expected a file system that supports {mode}"
        )
    if mode != "wal":
        db.execute("BEGIN EXCLUSIVE")  # takes the lock before the run starts, not at its first write
        db.execute("COMMIT")


def open_readonly(path: Path) -> sqlite3.Connection:
    """Open the ledger read-only, in autocommit mode.

    Raises:
        UserError: the file does not exist, is damaged, is not one of rlsys, or has another schema.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file: the folder is not a run, or the run has not started")
    uri = path.absolute().as_uri() + "?mode=ro"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=READER_SECONDS)
    try:
        check_format(db, path)
    except sqlite3.Error as e:
        db.close()
        raise UserError(f"{path}: not a usable ledger: {e}") from None
    except UserError:
        db.close()
        raise
    return db


def is_new(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether the file has no tables: it is new, or its creation was interrupted."""
    if path.stat().st_size == 0:
        return True
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return not _pragma(db, "application_id") and not tables


def _create(db: sqlite3.Connection, identity: str, largest_group: int) -> None:
    db.execute("BEGIN IMMEDIATE")
    db.execute(f"PRAGMA application_id={_APPLICATION_ID}")
    db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
    for statement in _SCHEMA.split(";\n"):
        db.execute(statement)
    meta = {"identity": identity, "largest_group": largest_group}
    counters = dict.fromkeys(COUNTERS, 0)
    db.executemany("INSERT INTO meta VALUES (?, ?)", {**meta, **counters}.items())
    db.execute("COMMIT")


def _check_pages(db: sqlite3.Connection, path: Path) -> None:
    result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if result != "ok":
        raise UserError(f"{path}: damaged ({' '.join(result.split())}); move it away or restore it")


def _adopt(db: sqlite3.Connection, path: Path, identity: str, largest_group: int) -> None:
    """Check that the file has the identity of this run; set it if the file has no groups, as after a failed start.

    Raises:
        UserError: the file has groups of another identity.
    """
    meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
    if meta["identity"] == identity:
        return
    if meta["issued"]:
        raise UserError(
            f"{path}: has rollouts of another config: its identity is {meta['identity']}, expected {identity}"
        )
    with db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'identity'", (identity,))
        db.execute("UPDATE meta SET value = ? WHERE key = 'largest_group'", (largest_group,))


def check_format(db: sqlite3.Connection, path: Path) -> None:
    """Check that an SQLite file is a ledger of this version of rlsys.

    Raises:
        UserError: another program wrote the file, or it has another schema.
    """
    if _pragma(db, "application_id") != _APPLICATION_ID:
        raise UserError(f"{path}: an SQLite file, but not one of rlsys; rlsys has not changed it")
    version = _pragma(db, "user_version")
    if version != _SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {version}, expected {_SCHEMA_VERSION}; use the version of rlsys that wrote it"
        )


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def ids_to_blob(ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian int32.

    Raises:
        OverflowError: an id does not fit into int32.
    """
    return np.asarray(ids, "<i4").tobytes()


def blob_to_ids(blob: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(blob, dtype="<i4").tolist()
    return ids


def read_groups(db: sqlite3.Connection, condition: str, *values: object) -> list[SampleGroup]:
    """Read the groups that fulfil an SQL condition, ordered by id, without their tokens.

    The pieces of the samples locate the tokens.

    Args:
        condition: condition on the table groups, with a placeholder `?` for each of `values`.
    """
    groups: dict[int, SampleGroup] = {}
    prompts: dict[int, list[int]] = {}
    columns = "group_id, prompt_index, state, train_step, prompt_ids"
    for row in db.execute(f"SELECT {columns} FROM groups WHERE {condition} ORDER BY group_id", values):
        groups[row[0]] = SampleGroup(row[0], row[1], [], GroupState(row[2]), row[3])
        prompts[row[0]] = blob_to_ids(row[4])
    of_groups = f"group_id IN (SELECT group_id FROM groups WHERE {condition})"
    pieces: dict[tuple[int, int], list[Piece]] = {}
    query = (
        "SELECT sample_id, sequence, name, start, pieces.length FROM pieces JOIN segments USING (segment) "
        f"JOIN samples USING (sample_id) WHERE {of_groups} ORDER BY piece"
    )
    for sample_id, sequence, *location in db.execute(query, values):
        pieces.setdefault((sample_id, sequence), []).append(Piece(*location))
    samples: dict[int, Sample] = {}
    for row in select(db, f"SELECT * FROM samples WHERE {of_groups} ORDER BY sample_id", values):
        sample_id, group_id = row["sample_id"], row["group_id"]
        samples[sample_id] = sample_of_row(row, prompts[group_id], pieces.get((sample_id, 0), []))
        groups[group_id].samples.append(samples[sample_id])
    sequence_query = f"SELECT * FROM sequences WHERE {of_groups} ORDER BY sample_id, sequence"
    for row in select(db, sequence_query, values):
        key = row["sample_id"], row["sequence"]
        samples[key[0]].extra_sequences.append(sequence_of_row(row, pieces.get(key, [])))
    return list(groups.values())


def select(db: sqlite3.Connection, query: str, values: Sequence[object]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a query as dicts, column name -> value."""
    cursor = db.execute(query, values)
    names = [column[0] for column in cursor.description]
    for row in cursor:
        yield dict(zip(names, row, strict=True))


def insert(db: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert rows, or replace those with the same primary key. All rows have the columns of the first one."""
    if rows:
        names = ", ".join(rows[0])
        placeholders = ", ".join(f":{name}" for name in rows[0])
        db.executemany(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({placeholders})", rows)


def row_of_sequence(q: TokenSequence) -> dict[str, object]:
    """Return the row of a sequence in the table sequences."""
    return {"prompt_ids": ids_to_blob(q.prompt_ids), **to_columns(q, _SEQUENCE_COLUMNS)}


def row_of_sample(sample: Sample) -> dict[str, object]:
    """Return the row of a sample in the table samples."""
    has_prompt = sample.trained_prompt is not None or sample.own_prompt
    prompt_ids = ids_to_blob(sample.prompt_ids) if has_prompt else None
    return {"tokens": sample.all_tokens, "prompt_ids": prompt_ids, **to_columns(sample, _SAMPLE_COLUMNS)}


def sequence_of_row(row: Mapping[str, Any], pieces: list[Piece]) -> TokenSequence:
    """Create a sequence from its row and the pieces that locate its tokens."""
    prompt_ids = blob_to_ids(row["prompt_ids"])
    return TokenSequence(prompt_ids=prompt_ids, pieces=pieces, **from_columns(row, _SEQUENCE_COLUMNS))


def sample_of_row(row: Mapping[str, Any], group_prompt: list[int], pieces: list[Piece]) -> Sample:
    """Create a sample from its row, the prompt of its group, and the pieces that locate its tokens."""
    blob = row["prompt_ids"]
    sample = Sample(
        prompt_ids=group_prompt if blob is None else blob_to_ids(blob), pieces=pieces,
        **from_columns(row, _SAMPLE_COLUMNS),
    )  # fmt: skip
    if blob is not None and not sample.own_prompt:
        sample.trained_prompt = group_prompt
    return sample
