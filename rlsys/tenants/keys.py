"""Keys of a server's tenants.

RUN/tenants/NAME/key    key for the client of the tenant, created at the first start with mode 0600
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from pathlib import Path

from rlsys.core.errors import UserError, disk_errors

FOLDER = "tenants"
PREFIX = "tml-"
"""Prefix that Tinker's client requires."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def check_names(names: list[str]) -> None:
    """Check the names of tenants.

    Raises:
        UserError: a name is invalid or a duplicate.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"--tenant {name[:80]!r}: expected at most 63 lower-case letters, digits, '-' and '_', the first one "
                "not '-' or '_'"
            )
        if names.count(name) > 1:
            raise UserError(f"--tenant {name}: occurs {names.count(name)} times; expected each name once")


def key_file(run_dir: Path, name: str) -> Path:
    """Return the path of a tenant's key."""
    return run_dir / FOLDER / name / "key"


def key_of(run_dir: Path, name: str) -> str:
    """Return the key of a tenant, which is created if it does not exist.

    Raises:
        UserError: other users may read the key's file, or it contains no key.
    """
    path = key_file(run_dir, name)
    part = path.with_suffix(".part")
    with disk_errors(path, UserError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            return _read(path)
        part.unlink(missing_ok=True)  # a killed start leaves it
        key = PREFIX + secrets.token_hex(32)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    return key


def _read(path: Path) -> str:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise UserError(f"{path} has mode {mode:04o}, so other users may access it; expected mode 0600")
    key = path.read_text(encoding="utf-8").strip()
    if not key.startswith(PREFIX) or len(key) < 32:
        raise UserError(
            f"{path}: has {len(key)} characters; expected a key of at least 32 characters that starts with {PREFIX}"
        )
    return key


class Keys:
    """The keys of all tenants. `by_name`: name of a tenant -> its key."""

    def __init__(self, by_name: dict[str, str]) -> None:
        self._keys = {name: key.encode() for name, key in by_name.items()}

    def tenant(self, key: str) -> str | None:
        """Return the name of the tenant with this key; None for an unknown key. Compares in constant time."""
        data = key.encode(errors="replace")
        names = [name for name, secret in self._keys.items() if hmac.compare_digest(data, secret)]
        return names[0] if names else None
