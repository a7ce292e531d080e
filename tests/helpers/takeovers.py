"""Fault injection: another launch takes over a run before a commit, and file locks have no effect."""

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


def run_after_check(owner: Owner, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `action` once, between a writer's check that `owner` owns the run and its commit."""
    original, pending = Owner.check, [action]

    def check(self: Owner) -> None:
        original(self)
        if self is owner and pending:
            pending.pop()()

    monkeypatch.setattr(Owner, "check", check)


def disable_file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable flock and SQLite's locks, as between two machines on a shared file system."""
    original = sqlite3.connect

    def connect(path: Path | str, **options: Any) -> sqlite3.Connection:
        if isinstance(path, str):  # the database of coverage
            return original(path, **options)
        return original(path.as_uri() + "?vfs=unix-none", uri=True, **options)

    monkeypatch.setattr(fcntl, "flock", flock_on_shared_folders)
    monkeypatch.setattr(store, "is_local", lambda _: False)
    monkeypatch.setattr(sqlite3, "connect", connect)
