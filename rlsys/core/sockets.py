"""Unix sockets of a run: private folders, and HTTP to a listener whose user is verified.

Linux limits the path of a Unix socket to 107 bytes, so these folders lie neither under TMPDIR nor in the run
folder, which may be deep or on a file system without sockets. A client asks the kernel (SO_PEERCRED) which
user listens before it sends anything: a path can be left over, and another user may have created it again.
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
"""Age from which the maker of a folder without its final name is taken for dead; naming takes milliseconds."""
_locks: list[int] = []
"""Descriptors of the folders that this process has created."""
_PARENTS = ("/tmp", "/var/tmp", "/dev/shm")
_MAX_PARENT_LENGTH = 50
"""Maximum length of a folder to use when no folder of `_PARENTS` works: names in it need the rest of 107 bytes."""


def make_folder() -> Path:
    """Create a folder for sockets, mode 0700, and remove those of killed processes.

    Raises:
        UserError: no suitable folder is writable.
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
            # The folder gets the name that `_sweep` looks for once it is locked: a process that starts at the
            # same time must not take it for one whose maker has ended.
            _locks.append(_lock(draft / _LOCK, os.O_CREAT))  # for the life of this process
            folder = draft.rename(draft.with_name(draft.name.removeprefix(".")))
        except OSError as e:
            remove_tree(draft)
            failures.append(f"{parent}: {e.strerror}")
            continue
        if _is_locked(folder / _LOCK):
            _sweep(Path(parent))
        return folder
    raise UserError(
        f"no folder for Unix sockets ({'; '.join(failures)}; TMPDIR = {tmpdir}: max. {_MAX_PARENT_LENGTH} characters)"
    )


def _lock(path: Path, flags: int = 0) -> int:
    """A descriptor that holds the file's lock, as long as it is open. Raises OSError where another one holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_locked(path: Path) -> bool:
    """Return whether the lock that this process holds excludes others; on some file systems it does not."""
    try:
        os.close(_lock(path))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _sweep(parent: Path) -> None:
    """Remove folders of this user whose owner has been killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, somebody else's, or has gone
            if folder.lstat().st_uid == os.geteuid():
                descriptor = _lock(folder / _LOCK)
                remove_folder(folder)
                os.close(descriptor)
    oldest = time.time() - _DRAFT_SECONDS
    for draft in parent.glob(f".{_PREFIX}*"):  # its maker was killed before it could give the folder its name
        with contextlib.suppress(OSError):
            status = draft.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime < oldest:
                remove_tree(draft)


def remove_folder(folder: Path) -> None:
    """Remove a folder that `make_folder` created, with its content; any other folder is left alone."""
    if folder.name.startswith(_PREFIX):
        remove_tree(folder)


def remove_tree(folder: Path | str) -> None:
    """Remove a folder in which untrusted programs may have written: at any depth, without following a link.

    What cannot be removed stays. shutil.rmtree recurses once per level, and raises RecursionError.
    """
    with contextlib.suppress(OSError):
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def role_folder() -> Path:
    """Return the folder of this role's sockets: its keeper's, or without a keeper a new one for this process.

    A folder that no longer exists, because a cleaner of temporary files has removed it, is replaced.
    """
    inherited = os.environ.get(FOLDER_VARIABLE)
    if inherited is not None:
        if Path(inherited).is_dir():
            return Path(inherited)
        log.warning("the folder of sockets %s has been removed; creating another one", inherited)
    folder = make_folder()
    os.environ[FOLDER_VARIABLE] = str(folder)  # for the processes that this one starts
    owner = os.getpid()
    atexit.register(lambda: remove_folder(folder) if os.getpid() == owner else None)
    return folder


class UnknownListener(OSError):
    """A user who is not allowed to listens on a Unix socket. Nothing was sent."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP connection to the Unix socket `path`."""

    def __init__(self, path: Path, timeout: float | None, users: Collection[int] = ()) -> None:
        """Create the connection.

        Args:
            path: the socket.
            timeout: seconds for each operation.
            users: ids of the users who may listen there; empty for the user of this process.
        """
        super().__init__("localhost", timeout=timeout)
        self._path, self._users = path, users or (os.geteuid(),)

    def connect(self) -> None:
        """Connect, and verify the listener's user.

        Raises:
            UnknownListener: a user listens who is not allowed to.
            OSError: no process listens.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(self.timeout)
            connection.connect(str(self._path))
            if (user := _listener(connection)) not in self._users:
                raise UnknownListener(f"{self._path}: user {user} listens there")
        except BaseException:
            connection.close()
            raise
        self.sock = connection


def _listener(connection: socket.socket) -> int:
    """Return the effective user id of the process at the other end, as of its call of listen()."""
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
