"""Protection of folders and files against other users, and atomic replacement of files."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import tempfile
from pathlib import Path

from rlsys.core.errors import UserError, disk_errors

PART = ".part"
"""Suffix of the name of an incomplete file."""


def check_owner(folder: Path, field: str = "", *, entries: bool = False) -> None:
    """Check that this user owns an existing folder, and the link if `folder` is a symbolic link.

    Another user may have created a folder at a predictable path.

    Args:
        field: name of the setting, for the message.
        entries: whether to check the direct entries of the folder, too; they may also belong to root.

    Raises:
        UserError: another user owns the folder, the link or an entry.
    """
    name = f"{field} = {folder}" if field else str(folder)
    with disk_errors(folder, UserError):
        with tempfile.TemporaryFile(dir=folder, suffix=PART) as probe:
            user = os.fstat(probe.fileno()).st_uid  # a file server may map user ids, so geteuid() may differ
        for status in (folder.lstat(), folder.stat()):
            if status.st_uid != user:
                raise UserError(
                    f"{name}: belongs to {_user_name(status.st_uid)}; expected a folder of {_user_name(user)}"
                )
        owners = {}
        for entry in sorted(os.listdir(folder)) if entries else ():
            with contextlib.suppress(FileNotFoundError):  # a live run deletes files
                owners[entry] = (folder / entry).lstat().st_uid
    for entry, owner in owners.items():
        if owner not in (user, 0):
            raise UserError(
                f"{name}: {entry} in it belongs to {_user_name(owner)}; expected files of {_user_name(user)}"
            )


def _user_name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def deny_writing_by_others() -> None:
    """Extend the umask so that only this user can write to files that this process and its children create."""
    os.umask(os.umask(0o077) | 0o022)


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Replace a file atomically: readers see either the old or the new content.

    Args:
        path: the file; a symbolic link is replaced, not followed.
        content: the new content.
        sync: whether to sync the content to disk before the replacement; then a crash, too, leaves the old or the new
            content.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
