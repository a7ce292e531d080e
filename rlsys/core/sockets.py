"""Unix sockets of a run: private folders for them, and HTTP to a listener whose user is verified.

Linux limits the path of a Unix socket to 107 bytes, so the folders are in /tmp or the like. TMPDIR and the run folder
may have long paths, or be on a file system without sockets. Before a client sends data, it asks the kernel for the
user who listens (SO_PEERCRED), because another user may have created a socket at the path of an ended process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import http.client
import logging
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from rlsys.core.errors import UserError

log = logging.getLogger("rlsys")

FOLDER_VARIABLE = "RLSYS_SOCKETS"
"""Environment variable of a role's processes: the folder of their sockets, which exists as long as the role."""
STORE_VARIABLE = "RLSYS_STORE"
"""Environment variable of ranks on one machine: their rendezvous file, one per start (rlsys/core/rendezvous.py)."""
_PREFIX, _LOCK = "rlsys-", ".lock"
_DRAFT_SECONDS = 3600.0
"""Age in seconds at which a folder without its final name is removed; its creator has ended before the renaming."""
_locks: list[int] = []
"""Descriptors of the locks of the folders that this process has created."""
_PARENTS = ("/tmp", "/var/tmp", "/dev/shm")
_MAX_PARENT_LENGTH = 50
"""Maximum length of TMPDIR, which is used if no folder of `_PARENTS` is suitable. Socket names need the rest of 107
bytes."""


def make_folder() -> Path:
    """Create a folder for sockets with mode 0700, and remove the folders of killed processes.

    Raises:
        UserError: no suitable parent folder is writable.
    """
    tmpdir = tempfile.gettempdir()
    failures = []
    for parent in (*_PARENTS, *([tmpdir] if len(tmpdir) <= _MAX_PARENT_LENGTH else [])):
        try:
            draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
        except OSError as e:
            failures.append(f"{parent}: {e.strerror}")
            continue
        try:
            # The folder gets its final name after it is locked, because another process may call `_sweep`.
            _locks.append(_lock(draft / _LOCK, os.O_CREAT))
            folder = draft.rename(draft.with_name(draft.name.removeprefix(".")))
        except OSError as e:
            remove_tree(draft)
            failures.append(f"{parent}: {e.strerror}")
            continue
        if _is_locked(folder / _LOCK):
            _sweep(Path(parent))
        return folder
    raise UserError(
        f"no folder for Unix sockets ({'; '.join(failures)}; TMPDIR = {tmpdir}: expected max. {_MAX_PARENT_LENGTH} "
        "characters)"
    )


def _lock(path: Path, flags: int = 0) -> int:
    """Lock a file exclusively, without waiting.

    Args:
        flags: additional flags of open().

    Returns:
        a descriptor; the lock ends when it is closed.

    Raises:
        OSError: another descriptor holds the lock, or the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_locked(path: Path) -> bool:
    """Return whether a lock that this process holds excludes other descriptors; some file systems ignore locks."""
    try:
        os.close(_lock(path))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _sweep(parent: Path) -> None:
    """Remove this user's folders in `parent` whose processes were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # the folder is in use, or was removed meanwhile
            if folder.lstat().st_uid == os.geteuid():
                descriptor = _lock(folder / _LOCK)
                remove_folder(folder)
                os.close(descriptor)
    oldest = time.time() - _DRAFT_SECONDS
    for draft in parent.glob(f".{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = draft.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime < oldest:
                remove_tree(draft)


def remove_folder(folder: Path) -> None:
    """Remove a folder and its content if its name is one of `make_folder`."""
    if folder.name.startswith(_PREFIX):
        remove_tree(folder)


def remove_tree(folder: Path | str) -> None:
    """Remove a folder in which untrusted programs may have written, without following links.

    Files that cannot be removed remain.
    """
    # shutil.rmtree recurses once per level, so a deep folder would exceed Python's limit.
    with contextlib.suppress(OSError):
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def role_folder() -> Path:
    """Return the folder of this role's sockets.

    If the role's keeper has created none, or the folder was removed, a folder is created. It exists until this
    process exits.
    """
    inherited = os.environ.get(FOLDER_VARIABLE)
    if inherited is not None:
        if Path(inherited).is_dir():
            return Path(inherited)
        log.warning("the folder of sockets %s does not exist any more; creating another one", inherited)
    folder = make_folder()
    os.environ[FOLDER_VARIABLE] = str(folder)  # for the processes that this one starts
    owner = os.getpid()
    atexit.register(lambda: remove_folder(folder) if os.getpid() == owner else None)
    return folder


class UnknownListener(OSError):
    """A user who is not permitted listens on a Unix socket. No data was sent."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP connection to a Unix socket."""

    def __init__(self, path: Path, timeout: float | None, users: Collection[int] = ()) -> None:
        """Create the connection.

        Args:
            path: path of the socket.
            timeout: timeout of each operation in seconds; None: no timeout.
            users: ids of the users who are permitted to listen; empty: the user of this process.
        """
        super().__init__("localhost", timeout=timeout)
        self._path, self._users = path, users or (os.geteuid(),)

    def connect(self) -> None:
        """Connect, and verify the listener's user.

        Raises:
            UnknownListener: the listener's user is not among the permitted ones.
            OSError: no process listens.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(self.timeout)
            connection.connect(str(self._path))
            if (user := _listener(connection)) not in self._users:
                raise UnknownListener(
                    f"{self._path}: user {user} listens there; expected {', '.join(map(str, self._users))}"
                )
        except BaseException:
            connection.close()
            raise
        self.sock = connection


def _listener(connection: socket.socket) -> int:
    """Return the effective user id with which the process at the other end called listen()."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Send one request, close the connection, and return status and body.

    Raises:
        OSError, http.client.HTTPException: the request failed.
    """
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
