"""Ledger of a tenant: accepted requests with bodies and results, and saved weights.

    RUN/tenants/NAME/ledger.sqlite    the tables below
    RUN/tenants/NAME/states/          the newest state of each model, one file (resident.AdapterState)
    RUN/tenants/NAME/saved/           weights that the tenant has saved by name

    sessions   sessions of clients
    models     `state`: file of the newest state; `applied`: last request that the state includes; `updates`: number
               of optimizer steps that it includes
    requests   `series`: id of the model or the sampling session; `outcome`: done, failed, or NULL: no result yet;
               `tries`: number of starts of the server at which the request was the first of its series without a
               result; `deaths`: number of deaths of engines during the request
    saves      saved weights, by their path tinker://MODEL/KIND/NAME
    samplers   sampling sessions; `path`: the weights, or NULL: the base model

A request is committed before its client gets the response. A result is committed in one transaction with the name of
the resulting state, which records the last request that it includes. Every request is therefore applied exactly once,
also after a kill -9 at any moment. With synchronous=FULL, commits survive a power failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.core.errors import RunError, UserError, disk_errors
from rlsys.obs.filesystem import is_local

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, created REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, created REAL NOT NULL, applied INTEGER NOT NULL, updates INTEGER NOT NULL, state TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (
    series TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, digest BLOB NOT NULL,
    accepted REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0, outcome TEXT, result BLOB, finished REAL,
    deaths INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (series, seq)
);
CREATE INDEX IF NOT EXISTS bodies ON requests (LENGTH(body)) WHERE LENGTH(body) > 0;
CREATE TABLE IF NOT EXISTS saves (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, seq INTEGER NOT NULL, updates INTEGER NOT NULL, created REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, path TEXT, created REAL NOT NULL) WITHOUT ROWID;
"""
_ADD_DEATHS = "ALTER TABLE requests ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0"
"""Migration of a ledger that was created before the column `deaths` existed."""
FILE_NAME = "ledger.sqlite"


MAX_BODY_BYTES = 2**31
"""Largest size in bytes of a tenant's stored bodies: of requests without a result, and of passes since the last
optimizer step."""
MAX_ROWS = 4096
"""Largest number of a tenant's sessions, and of its sampling sessions."""


class LimitExceeded(Exception):
    """Raised if a limit of the tenant is reached. The client may retry."""


class Conflict(UserError):
    """Raised if another request has the same number."""


@dataclass(frozen=True)
class Request:
    """A request of a client.

    Attributes:
        series: id of the model or the sampling session.
        seq: number of the request in its series.
        kind: last part of the request's URL, `forward`, or `sample`.
        tries: number of starts of the server at which the request was the first of its series without a result.
        deaths: number of deaths of engines during the request, before this start of the server.
    """

    series: str
    seq: int
    kind: str
    tries: int = 0
    deaths: int = 0

    @property
    def id(self) -> str:
        """SERIES:SEQ."""
        return f"{self.series}:{self.seq}"


@dataclass(frozen=True)
class ModelRow:
    """A row of the table `models`."""

    id: str
    applied: int
    updates: int
    state: str | None


@dataclass(frozen=True)
class Change:
    """Effect of a request on its model.

    Attributes:
        model: id of the model.
        updates: number of optimizer steps, including this request.
        state: name of the state's file, which includes all requests up to this one.
    """

    model: str
    updates: int
    state: str


class Ledger:
    """Owns the files of a tenant. Thread-safe. All methods raise RunError for an error of disk or database."""

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        """Open or create a ledger.

        Args:
            folder: folder of the tenant.
            check: called before each change. It raises FencedError if another launch owns the folder.
        """
        self.folder, self._check = folder, check
        with disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("states", "saved"):
                (folder / name).mkdir(exist_ok=True)
        self._path = folder / FILE_NAME
        self._lock = threading.Lock()
        with self._errors():
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._db.execute(f"PRAGMA journal_mode={'WAL' if is_local(folder) else 'DELETE'}")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            if "deaths" not in {row[1] for row in self._db.execute("PRAGMA table_info(requests)")}:
                self._db.execute(_ADD_DEATHS)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of the disk and the database to RunError."""
        try:
            with disk_errors(self._path):
                yield
        except sqlite3.Error as e:
            raise RunError(f"{self._path}: {e}") from None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run the context in a transaction, which is rolled back if the context raises an error."""
        with self._lock, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._check()
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, self._errors():
            return self._db.execute(query, values).fetchall()

    # -- requests -----------------------------------------------------------------------------------------------

    def accept(self, series: str, seq: int, kind: str, body: bytes) -> bool:
        """Store a request.

        Args:
            series: id of the model or the sampling session.
            seq: number of the request in its series.
            kind: kind of the request.
            body: body of the request.

        Returns:
            Whether the request is new; False if the same request is already stored.

        Raises:
            Conflict: another request has this number.
            LimitExceeded: the tenant's bodies would exceed MAX_BODY_BYTES.
        """
        digest = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        with self._writing() as db:
            row = db.execute(
                "SELECT digest FROM requests WHERE series = ? AND seq = ?", (series, seq)
            ).fetchone()
            if row is None:
                query = "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM requests WHERE LENGTH(body) > 0"
                queued_bytes = int(db.execute(query).fetchone()[0])
                if queued_bytes + len(body) > MAX_BODY_BYTES:
                    raise LimitExceeded(
                        f"{queued_bytes} bytes of requests wait for a result or an optimizer step, and this request "
                        f"has {len(body)}; expected at most {MAX_BODY_BYTES} bytes in total; try again later"
                    )
                db.execute(
                    "INSERT INTO requests (series, seq, kind, body, digest, accepted) VALUES (?, ?, ?, ?, ?, ?)",
                    (series, seq, kind, body, digest, time.time()),
                )
            elif row[0] != digest:
                raise Conflict(
                    f"{series}: another request has the number {seq}; expected an unused number, or the same request"
                )
            return row is None

    def body(self, request: Request) -> bytes:
        """Return the body of a request; empty if it was deleted after the result."""
        rows = self._rows(
            "SELECT body FROM requests WHERE series = ? AND seq = ?", request.series, request.seq
        )
        return bytes(rows[0][0])

    def result(self, series: str, seq: int) -> tuple[str, str | None, bytes] | None:
        """Return kind, outcome and result of a request; None if the request is unknown.

        The outcome is `done`, `failed`, or None without a result.
        """
        rows = self._rows(
            "SELECT kind, outcome, result FROM requests WHERE series = ? AND seq = ?", series, seq
        )
        return (rows[0][0], rows[0][1], bytes(rows[0][2] or b"")) if rows else None

    def finish(
        self, request: Request, result: bytes, *, failed: bool = False, change: Change | None = None
    ) -> None:
        """Store the result and the effect of a request in one transaction, and delete bodies that no restart needs.

        Args:
            request: the request.
            result: encoded result.
            failed: whether the request failed.
            change: effect on the model; None: none.
        """
        keep_body = request.kind == "forward_backward" and not failed
        with self._writing() as db:
            db.execute(
                "UPDATE requests SET outcome = ?, result = ?, finished = ?, body = CASE WHEN ? THEN body ELSE x'' "
                "END WHERE series = ? AND seq = ?",
                ("failed" if failed else "done", result, time.time(), keep_body, request.series, request.seq),
            )
            if change is not None:
                db.execute(
                    "UPDATE requests SET body = x'' WHERE series = ? AND seq <= ? AND LENGTH(body) > 0",
                    (request.series, request.seq),
                )
                db.execute(
                    "UPDATE models SET applied = ?, updates = ?, state = ? WHERE id = ?",
                    (request.seq, change.updates, change.state, change.model),
                )

    def add_death(self, request: Request) -> int:
        """Count a death of an engine during a request, and return the number of deaths during it."""
        condition = "WHERE series = ? AND seq = ?"
        with self._writing() as db:
            db.execute(f"UPDATE requests SET deaths = deaths + 1 {condition}", (request.series, request.seq))
            query = f"SELECT deaths FROM requests {condition}"
            return int(db.execute(query, (request.series, request.seq)).fetchone()[0])

    def count(self, kind: str) -> int:
        """Count the successful requests of a kind."""
        rows = self._rows("SELECT COUNT(*) FROM requests WHERE kind = ? AND outcome = 'done'", kind)
        return int(rows[0][0])

    def next_seq(self, series: str) -> int:
        """Return the number after that of the last request with a result; 0 for a new series."""
        rows = self._rows("SELECT MAX(seq) FROM requests WHERE series = ? AND outcome IS NOT NULL", series)
        return 0 if rows[0][0] is None else int(rows[0][0]) + 1

    def unfinished(self) -> list[Request]:
        """Return the requests without a result, by series and number. Must be called once at a start of the server.

        Increments `tries` of the first request of each series.
        """
        with self._writing() as db:
            db.execute(
                "UPDATE requests SET tries = tries + 1 WHERE outcome IS NULL AND seq = (SELECT MIN(seq) FROM "
                "requests AS r WHERE r.series = requests.series AND r.outcome IS NULL)"
            )
        rows = self._rows(
            "SELECT series, seq, kind, tries, deaths FROM requests WHERE outcome IS NULL ORDER BY series, seq"
        )
        return [Request(*row) for row in rows]

    def done_since(self, model: str, seq: int, kind: str) -> list[Request]:
        """Return the successful requests of a model after a number.

        Args:
            model: id of the model.
            seq: number of the last request that is not returned.
            kind: kind of the requests.
        """
        rows = self._rows(
            "SELECT series, seq, kind, tries FROM requests WHERE series = ? AND seq > ? AND kind = ? AND "
            "outcome = 'done' ORDER BY seq",
            model, seq, kind,
        )  # fmt: skip
        return [Request(*row) for row in rows]

    # -- sessions, models, saved weights --------------------------------------------------------------------------

    def add_session(self, session: str) -> None:
        """Add a session of a client."""
        with self._writing() as db:
            db.execute("INSERT INTO sessions VALUES (?, ?)", (session, time.time()))

    def sessions(self) -> list[str]:
        """Return the ids of all sessions."""
        return [row[0] for row in self._rows("SELECT id FROM sessions")]

    def add_model(self, model: str) -> None:
        """Add a model before its first request, unless it exists."""
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO models VALUES (?, ?, -1, 0, NULL)", (model, time.time()))

    def models(self) -> list[ModelRow]:
        """Return all models."""
        return [ModelRow(*row) for row in self._rows("SELECT id, applied, updates, state FROM models")]

    def add_save(self, path: str, model: str, seq: int, updates: int) -> None:
        """Add saved weights, or replace the weights with the same path.

        Args:
            path: tinker://MODEL/KIND/NAME.
            model: id of the model.
            seq: number of the request.
            updates: number of optimizer steps of the weights.
        """
        with self._writing() as db:
            db.execute(
                "INSERT OR REPLACE INTO saves VALUES (?, ?, ?, ?, ?)",
                (path, model, seq, updates, time.time()),
            )

    def saves(self) -> dict[str, tuple[str, int, int, float]]:
        """Return path -> (model, number of the request, optimizer steps, Unix time in seconds) of saved weights."""
        rows = self._rows("SELECT path, model, seq, updates, created FROM saves ORDER BY created")
        return {row[0]: (row[1], row[2], row[3], row[4]) for row in rows}

    def add_sampler(self, sampler: str, path: str | None) -> None:
        """Add a sampling session, unless it exists. `path`: path of its weights; None: the base model."""
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", (sampler, path, time.time()))

    def samplers(self) -> dict[str, str | None]:
        """Return sampling session -> path of its weights; None: the base model."""
        return {row[0]: row[1] for row in self._rows("SELECT id, path FROM samplers")}

    # -- files ----------------------------------------------------------------------------------------------------

    def write_state(self, model: str, seq: int, data: bytes) -> str:
        """Write a new state of a model durably, and return its name. `finish` with this name makes it current.

        Args:
            model: id of the model.
            seq: number of the request after which the model has this state.
            data: encoded state.
        """
        self._check()
        name = f"{model.replace(':', '-')}-{seq}.safetensors"
        write_file(self.folder / "states" / name, data)
        return name

    def state_file(self, name: str) -> Path:
        """Return the path of a state."""
        return self.folder / "states" / name

    def sweep(self) -> None:
        """Delete the states that no model has, and incomplete files."""
        state_names = {row.state for row in self.models()}
        self._check()
        with disk_errors(self.folder):
            for path in (self.folder / "states").iterdir():
                if path.name not in state_names:
                    path.unlink()

    def write_save(self, path: str, data: bytes) -> None:
        """Write saved weights durably. `path`: tinker://MODEL/weights/NAME."""
        self._check()
        write_file(self.save_path(path), data)

    def save_path(self, path: str) -> Path:
        """Return the file (kind `weights`) or folder (other kinds) of the weights tinker://MODEL/KIND/NAME."""
        model, kind, name = path.removeprefix("tinker://").split("/")
        folder = self.folder / "saved" / model.replace(":", "-") / kind
        return folder / (f"{name}.safetensors" if kind == "weights" else name)


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically and durably."""
    part = path.with_name(path.name + ".part")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def as_json(value: Any) -> bytes:
    """Encode a result as JSON."""
    return json.dumps(value).encode()
