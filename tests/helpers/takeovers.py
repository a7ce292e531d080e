"""A launch takes a run over at the worst moment, on a file system on which nobody sees its locks."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.core.owner import Owner
from rlsys.ledger import store
from tests.helpers.file_locks import flock_on_shared_folders


def between_look_and_commit(owner: Owner, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """`do` happens once, when a writer of `owner` has just seen that it owns the run."""
    plain, todo = Owner.check, [do]

    def check(self: Owner) -> None:
        plain(self)
        if self is owner and todo:
            todo.pop()()

    monkeypatch.setattr(Owner, "check", check)


def take_locks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two machines of a shared file system: neither flock nor SQLite's locks keep anybody out."""
    plain = sqlite3.connect

    def connect(path: Path | str, **options: Any) -> sqlite3.Connection:
        if isinstance(path, str):  # not ours: coverage writes down what each test runs
            return plain(path, **options)
        return plain(path.as_uri() + "?vfs=unix-none", uri=True, **options)

    monkeypatch.setattr(fcntl, "flock", flock_on_shared_folders)
    monkeypatch.setattr(store, "is_local", lambda _: False)
    monkeypatch.setattr(sqlite3, "connect", connect)
