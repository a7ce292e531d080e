"""Ownership of a run folder: the newest launch owns the folder, and fences off earlier launches.

    RUN/owners/000007    file of the launch that owns the folder; mode 0600, JSON {epoch, key, host, pid, sockets}

A launch takes the next number, its epoch: it creates the file with this name exclusively, then deletes the files with
lower numbers. A process of a launch calls `Owner.check` before it changes data that outlives the process. `check`
opens the launch's file, which does not exist any more when another launch owns the folder. This needs no lock: the
file server decides exclusive creation and opening of files (NFS version 3 and later, Lustre), also where flock works
on one machine only. The key in the file authorizes commands.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlsys.core.errors import RunError, UserError, disk_errors
from rlsys.core.sockets import remove_folder

FOLDER = "owners"
EPOCH_VARIABLE = "RLSYS_EPOCH"
START_VARIABLE = "RLSYS_START"
KEY_HEADER = "X-Rlsys-Key"
START_HEADER = "X-Rlsys-Start"


class FencedError(RunError):
    """A later launch owns the run folder, so this process must not write any more."""


@dataclass(frozen=True)
class Owner:
    """Ownership of a run folder by one launch.

    Attributes:
        run_dir: the run folder.
        epoch: number of the launch, from 1.
        key: secret that authorizes commands; it must not appear in logs and command lines.
        sockets: folder of the launch's Unix sockets, on the machine of its supervisor.
    """

    run_dir: Path
    epoch: int
    key: str
    sockets: Path = Path()

    @property
    def rollout_socket(self) -> Path:
        """Unix socket on which the rollout process accepts commands, the only requests with the key."""
        return self.sockets / "rollout"

    def check(self) -> None:
        """Check that this launch still owns the folder.

        Raises:
            FencedError: a later launch owns it.
            RunError: the owner cannot be determined because of a disk error.
        """
        path = _file(self.run_dir, self.epoch)
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as e:
            if e.errno not in (
                errno.ENOENT,
                errno.ESTALE,
            ):  # other errors do not mean that the file is deleted
                raise RunError(f"{path}: cannot determine the owner of the run: {e.strerror}") from None
            newest = max(_epochs(self.run_dir), default=0)
            raise FencedError(
                f"{self.run_dir}: launch {self.epoch} no longer owns this run; launch {newest} has taken it"
            ) from None

    def environment(self, start: int) -> dict[str, str]:
        """Return the environment variables that tell a role's process its launch and its start.

        Args:
            start: number of starts of the process's unit in this launch.
        """
        return {EPOCH_VARIABLE: str(self.epoch), START_VARIABLE: str(start)}


def claim(run_dir: Path, sockets: Path = Path()) -> Owner:
    """Make a new launch the owner of the run folder. When the function returns, earlier launches are fenced off.

    Args:
        sockets: folder of the launch's Unix sockets.

    Raises:
        RunError: the files cannot be written.
    """
    with disk_errors(run_dir / FOLDER):
        return _claim(run_dir, sockets)


def _claim(run_dir: Path, sockets: Path) -> Owner:
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    epoch, descriptor = _create_next_file(run_dir)
    key, host = secrets.token_urlsafe(32), socket.gethostname()
    record = json.dumps(
        {"epoch": epoch, "key": key, "host": host, "pid": os.getpid(), "sockets": str(sockets)}
    )
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as f:
            f.write(record)
            f.flush()
            os.fsync(f.fileno())
    except OSError:  # the earlier launch stays the owner
        with contextlib.suppress(OSError):
            _file(run_dir, epoch).unlink()
        raise
    for earlier in _epochs(run_dir):
        if earlier < epoch:
            _remove_sockets(_file(run_dir, earlier), host)
            _file(run_dir, earlier).unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Owner(run_dir, epoch, key, sockets)


def _create_next_file(run_dir: Path) -> tuple[int, int]:
    """Create the file of the next epoch, and return the epoch and a descriptor for writing."""
    while True:
        epoch = max(_epochs(run_dir), default=0) + 1
        try:
            descriptor = os.open(_file(run_dir, epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # another launch has taken this number meanwhile
            continue
        if max(_epochs(run_dir), default=epoch) == epoch:
            return epoch, descriptor
        # Since the listing, others have taken this number and the next one, and deleted the file of this number.
        os.close(descriptor)
        _file(run_dir, epoch).unlink(missing_ok=True)


def _remove_sockets(record: Path, host: str) -> None:
    """Remove the sockets of the launch with this record, if it ran on this machine, where it may have been killed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        fields = json.loads(record.read_text(encoding="utf-8"))
        if fields["host"] == host:
            remove_folder(Path(fields["sockets"]))


def current_owner(run_dir: Path) -> Owner | None:
    """Return the launch that owns the folder; None before the first launch, or if its file cannot be read."""
    epoch = max(_epochs(run_dir), default=0)
    return _read(run_dir, epoch) if epoch else None


def owner_of_process(run_dir: Path, environment: Mapping[str, str] = os.environ) -> tuple[Owner, int]:
    """Return the launch that started this process, and the number of starts of its unit in the launch.

    Raises:
        UserError: the environment variables of `Owner.environment` are missing.
        FencedError: another launch owns the folder.
        RunError: the launch's file cannot be read.
    """
    try:
        epoch, start = int(environment[EPOCH_VARIABLE]), int(environment[START_VARIABLE])
    except (KeyError, ValueError):
        raise UserError(
            f"{EPOCH_VARIABLE} and {START_VARIABLE} are not set; expected the environment of a process that "
            "`rlsys train` starts"
        ) from None
    owner = _read(run_dir, epoch)
    if owner is None:
        Owner(run_dir, epoch, "").check()  # raises FencedError with the current owner
        raise RunError(f"{_file(run_dir, epoch)}: not readable as an ownership record")
    return owner, start


def _read(run_dir: Path, epoch: int) -> Owner | None:
    try:
        fields = json.loads(_file(run_dir, epoch).read_text(encoding="utf-8"))
        return Owner(run_dir, epoch, str(fields["key"]), Path(fields["sockets"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file(run_dir: Path, epoch: int) -> Path:
    return run_dir / FOLDER / f"{epoch:06d}"


def _epochs(run_dir: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(run_dir / FOLDER) if name.isdigit()]
    except FileNotFoundError:
        return []
