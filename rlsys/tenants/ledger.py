"""A tenant's ledger: every request that was accepted, with its body and its result, and what is saved of its models.

    RUN/tenants/NAME/ledger.sqlite    the tables below
    RUN/tenants/NAME/states/          the newest state of each model, one file (resident.AdapterState)
    RUN/tenants/NAME/saved/           what the tenant has saved by name

    sessions   a client's
    models     `applied`: the last request whose effect `state` has; `updates`: optimizer steps in it
    requests   by series (a model, or a sampling session) and number; `outcome` NULL: not done yet; `tries`: starts of
               the server in which it stood first; `deaths`: of engines that worked on it
    saves      tinker://MODEL/KIND/NAME
    samplers   sampling sessions; `path` NULL: of the base model

A request is committed before its client hears of it, and its result together with the state that it led to. So after
a kill -9 at any moment a request has either been applied, or it will be: the state says up to which one it has them.
synchronous=FULL: what is committed survives a power cut as well.
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
_DEATHS = "ALTER TABLE requests ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0"
"""Of a ledger that an earlier version has made."""
FILE_NAME = "ledger.sqlite"


MOST_BYTES = 2**31
"""Of bodies that a tenant's ledger keeps: those that have no outcome, and passes since the last optimizer step."""
MOST_ROWS = 4096
"""Of a tenant: sessions, and sampling sessions."""


class TooMany(Exception):
    """More than a tenant may have; it may try again."""


class Conflict(UserError):
    """Another request has this number already."""


@dataclass(frozen=True)
class Request:
    """`seq`: its place in the series. `tries`: how often the server began with it at the head of its series.
    `deaths`: engines that died while they worked on it, before this start of the server."""

    series: str
    seq: int
    kind: str
    tries: int = 0
    deaths: int = 0

    @property
    def id(self) -> str:
        return f"{self.series}:{self.seq}"


@dataclass(frozen=True)
class ModelRow:
    id: str
    applied: int
    updates: int
    state: str | None


@dataclass(frozen=True)
class Change:
    """What a request has made of its model: all up to it is in `state`, the file's name."""

    model: str
    updates: int
    state: str


class Ledger:
    """Safe to call from several threads. Raises RunError when the disk refuses."""

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        """`check`: before each change; raises FencedError where another launch owns the folder by now."""
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
                self._db.execute(_DEATHS)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with disk_errors(self._path):
                yield
        except sqlite3.Error as e:
            raise RunError(f"{self._path}: {e}") from None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
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
        """Whether it is new; False when the same one is there. Raises Conflict for another one of that number,
        TooMany for more bytes than a tenant may leave here."""
        digest = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        with self._writing() as db:
            found = db.execute(
                "SELECT digest FROM requests WHERE series = ? AND seq = ?", (series, seq)
            ).fetchone()
            if found is None:
                query = "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM requests WHERE LENGTH(body) > 0"
                held = int(db.execute(query).fetchone()[0])
                if held + len(body) > MOST_BYTES:
                    raise TooMany(f"{held} bytes of requests wait or are not stepped yet; try again later")
                db.execute(
                    "INSERT INTO requests (series, seq, kind, body, digest, accepted) VALUES (?, ?, ?, ?, ?, ?)",
                    (series, seq, kind, body, digest, time.time()),
                )
            elif found[0] != digest:
                raise Conflict(f"{series}: another request has the number {seq}")
            return found is None

    def body(self, request: Request) -> bytes:
        rows = self._rows(
            "SELECT body FROM requests WHERE series = ? AND seq = ?", request.series, request.seq
        )
        return bytes(rows[0][0])

    def result(self, series: str, seq: int) -> tuple[str, str | None, bytes] | None:
        """Kind, outcome (`done`, `failed`; None: not yet) and result; None for a request that was never accepted."""
        rows = self._rows(
            "SELECT kind, outcome, result FROM requests WHERE series = ? AND seq = ?", series, seq
        )
        return (rows[0][0], rows[0][1], bytes(rows[0][2] or b"")) if rows else None

    def finish(
        self, request: Request, result: bytes, *, failed: bool = False, change: Change | None = None
    ) -> None:
        """Its result, and what it has made of its model, at once. Bodies that no start will read again go."""
        again = request.kind == "forward_backward" and not failed
        with self._writing() as db:
            db.execute(
                "UPDATE requests SET outcome = ?, result = ?, finished = ?, body = CASE WHEN ? THEN body ELSE x'' "
                "END WHERE series = ? AND seq = ?",
                ("failed" if failed else "done", result, time.time(), again, request.series, request.seq),
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
        """An engine has died while it worked on the request. Returns how many have."""
        where = "WHERE series = ? AND seq = ?"
        with self._writing() as db:
            db.execute(f"UPDATE requests SET deaths = deaths + 1 {where}", (request.series, request.seq))
            query = f"SELECT deaths FROM requests {where}"
            return int(db.execute(query, (request.series, request.seq)).fetchone()[0])

    def count(self, kind: str) -> int:
        """Requests of this kind that were done."""
        rows = self._rows("SELECT COUNT(*) FROM requests WHERE kind = ? AND outcome = 'done'", kind)
        return int(rows[0][0])

    def following(self, series: str) -> int:
        """The number behind the last one that has its outcome; 0 for a new series."""
        rows = self._rows("SELECT MAX(seq) FROM requests WHERE series = ? AND outcome IS NOT NULL", series)
        return 0 if rows[0][0] is None else int(rows[0][0]) + 1

    def unfinished(self) -> list[Request]:
        """In the order of their series. Each counts as tried once more where it stands at the head of one."""
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
        """Requests behind `seq` that were done, whose effect was in memory only."""
        rows = self._rows(
            "SELECT series, seq, kind, tries FROM requests WHERE series = ? AND seq > ? AND kind = ? AND "
            "outcome = 'done' ORDER BY seq",
            model, seq, kind,
        )  # fmt: skip
        return [Request(*row) for row in rows]

    # -- sessions, models, what is saved --------------------------------------------------------------------------

    def add_session(self, session: str) -> None:
        with self._writing() as db:
            db.execute("INSERT INTO sessions VALUES (?, ?)", (session, time.time()))

    def sessions(self) -> list[str]:
        return [row[0] for row in self._rows("SELECT id FROM sessions")]

    def add_model(self, model: str) -> None:
        """Before its first request."""
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO models VALUES (?, ?, -1, 0, NULL)", (model, time.time()))

    def models(self) -> list[ModelRow]:
        return [ModelRow(*row) for row in self._rows("SELECT id, applied, updates, state FROM models")]

    def add_save(self, path: str, model: str, seq: int, updates: int) -> None:
        """In the place of one of the same path."""
        with self._writing() as db:
            db.execute(
                "INSERT OR REPLACE INTO saves VALUES (?, ?, ?, ?, ?)",
                (path, model, seq, updates, time.time()),
            )

    def saves(self) -> dict[str, tuple[str, int, int, float]]:
        """By path: model, number of the request, optimizer steps, time."""
        rows = self._rows("SELECT path, model, seq, updates, created FROM saves ORDER BY created")
        return {row[0]: (row[1], row[2], row[3], row[4]) for row in rows}

    def add_sampler(self, sampler: str, path: str | None) -> None:
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?)", (sampler, path, time.time()))

    def samplers(self) -> dict[str, str | None]:
        return {row[0]: row[1] for row in self._rows("SELECT id, path FROM samplers")}

    # -- files ----------------------------------------------------------------------------------------------------

    def write_state(self, model: str, seq: int, data: bytes) -> str:
        """A new file of the model's state, on the disk when this returns; it counts once `finish` names it."""
        self._check()
        name = f"{model.replace(':', '-')}-{seq}.safetensors"
        write_file(self.folder / "states" / name, data)
        return name

    def state_file(self, name: str) -> Path:
        return self.folder / "states" / name

    def sweep(self) -> None:
        """Delete states that nothing names: those before the newest, and what a crash left half-way."""
        named = {row.state for row in self.models()}
        self._check()
        with disk_errors(self.folder):
            for path in (self.folder / "states").iterdir():
                if path.name not in named:
                    path.unlink()

    def write_saved(self, path: str, data: bytes) -> None:
        self._check()
        write_file(self.saved(path), data)

    def saved(self, path: str) -> Path:
        """Where `tinker://MODEL/KIND/NAME` lies."""
        model, kind, name = path.removeprefix("tinker://").split("/")
        folder = self.folder / "saved" / model.replace(":", "-") / kind
        return folder / (f"{name}.safetensors" if kind == "weights" else name)


def write_file(path: Path, data: bytes) -> None:
    """The whole file or none, on the disk when this returns."""
    part = path.with_name(path.name + ".part")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        at = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
