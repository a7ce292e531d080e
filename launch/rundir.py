"""Run folder: a lock against a second launch, and one config for its lifetime.

The lock is a flock that the supervisor takes and its keepers inherit, so it is released only when every process of
the run has ended, also after a kill -9 of the supervisor. A second launch waits for the lock. On a file system
without flock, and after a pause of a machine, the epoch of rlsys.core.owner prevents the first launch from writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlsys.config import Config, dump_config, identity_fields, load_run_config
from rlsys.core.errors import RlsysError, UserError, disk_errors
from rlsys.core.folders import PART, check_owner, deny_writing_by_others, replace_file
from rlsys.core.owner import Owner, claim
from rlsys.core.run_files import CONFIG_FILE, EVALUATIONS_FOLDER
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.obs.metrics import FILE_NAME as METRICS_FILE

DEAD_HOST_SECONDS = 120.0
"""Time limit for the lock of a launch on another machine. A file server keeps the locks of a dead machine until their
lease ends, 90 s with NFS."""
_LOCK = ".lock"


@dataclass(frozen=True)
class RunDir:
    """A locked run folder.

    Attributes:
        path: path of the folder.
        lock_fd: file descriptor of the lock, which processes of the run inherit.
        resumed: whether the folder has a run to resume.
        owner: identity of this launch.
        starts: number of starts of each role in this launch, counted over all its supervisors.
    """

    path: Path
    lock_fd: int
    resumed: bool
    owner: Owner
    starts: Counter[str] = field(default_factory=Counter)

    def log(self, name: str) -> Path:
        """Return the path of the log with this file name."""
        return self.path / "logs" / name


@contextlib.contextmanager
def open_run_dir(config: Config, report: Callable[[str], None]) -> Iterator[RunDir]:
    """Create or reopen the run folder, lock it, and write its config.

    Args:
        config: config of the run.
        report: receives a message if processes of a dead supervisor must end first.

    Raises:
        UserError: the folder contains a run of another config or foreign files, its run is in use, or another user
            owns the folder or a file in it.
    """
    path = config.run.dir
    make_run_folder(config)
    with disk_errors(path, UserError):
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        with disk_errors(path, UserError):
            _lock(fd, config, report)
            resumed = _check_contents(config)
            (path / "logs").mkdir(exist_ok=True)
            replace_file(path / CONFIG_FILE, dump_config(config).encode(), sync=True)
        sockets = make_folder()
        try:
            run_dir = RunDir(path, fd, resumed, claim(path, sockets))
            with _error_logged(run_dir.log("supervisor.log")):
                yield run_dir
        finally:
            remove_folder(sockets)
    finally:
        os.close(fd)


def make_run_folder(config: Config) -> None:
    """Create the run folder, or check that it belongs to this user, and set its mode (run.share).

    Afterwards only this user can write to it.

    Raises:
        UserError: another user owns the folder or a file in it, or the folder cannot be written.
    """
    path = config.run.dir
    deny_writing_by_others()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"run.dir = {path}: cannot create it: {e.strerror}") from None
    check_owner(path, "run.dir")
    with disk_errors(path, UserError):
        if path.stat().st_uid == os.geteuid():  # a file server that maps users reports another owner
            path.chmod(0o750 if config.run.share == "group" else 0o700)
    # Check the entries last: until the mode is set, others could create files.
    check_owner(path, "run.dir", entries=True)


@contextlib.contextmanager
def _error_logged(log: Path) -> Iterator[None]:
    """Write the error that ends the context to the supervisor's log, whose last lines `rlsys status` shows."""
    try:
        yield
    except RlsysError as e:
        text = " ".join(str(e).split()) + (f" ({e.origin})" if e.origin else "")
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as f:
            f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ended: {text}\n")
        raise


def _lock(fd: int, config: Config, report: Callable[[str], None]) -> None:
    """Take the lock. If processes of a dead supervisor have it, wait for their end.

    Raises:
        UserError: the supervisor lives, or the processes have not ended in time.
    """
    begin, reported = time.monotonic(), False
    while not _try_lock(fd):
        pid, _, host = os.pread(fd, 300, 0).decode().strip().partition(" ")
        is_remote = host not in ("", socket.gethostname())
        timeout_s = DEAD_HOST_SECONDS if is_remote else 2 * config.launch.grace_seconds
        alive = not is_remote and pid.isdigit() and psutil.pid_exists(int(pid))
        if alive or time.monotonic() - begin > timeout_s:
            suffix = f" of {host}" if is_remote else ""
            raise UserError(f"run.dir = {config.run.dir}: in use by process {pid or 'unknown'}{suffix}")
        if not reported:
            report("waiting for the processes of an earlier, killed run to end")
            reported = True
        time.sleep(0.2)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def _try_lock(fd: int) -> bool:
    """Take the lock, and return whether that succeeded."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_contents(config: Config) -> bool:
    """Return whether the folder has a run to resume.

    A run that has never started does not fix its config.

    Raises:
        UserError: the folder contains a run of another config, or foreign files.
    """
    path = config.run.dir
    if not (path / CONFIG_FILE).exists():
        _check_no_foreign_files(path)
        return False
    if not _has_started(path):
        return False
    if conflict := differences(load_run_config(path), config):
        raise UserError(
            f"run.dir = {path}: contains a run of another config ({conflict}); choose another folder"
        )
    return True


def _check_no_foreign_files(path: Path) -> None:
    """Check that a folder without a config contains nothing else than files of an earlier command of rlsys.

    `rlsys eval CONFIG` writes evaluations before the first start, and a killed start leaves partial files.

    Raises:
        UserError: it does.
    """
    own_files = (_LOCK, "logs", EVALUATIONS_FOLDER)
    foreign = sorted(p.name for p in path.iterdir() if p.name not in own_files and p.suffix != PART)
    if foreign:
        raise UserError(
            f"run.dir = {path}: contains {foreign[0]} but no {CONFIG_FILE}; expected a new folder or a run's folder"
        )


def _has_started(path: Path) -> bool:
    """Return whether the run has started. The trainer writes metrics before the first token is generated."""
    metrics = path / METRICS_FILE
    return (metrics.exists() and metrics.stat().st_size > 0) or (path / "checkpoints").exists()


def differences(old_config: Config, new_config: Config) -> str:
    """Return the fields that prevent `new_config` from resuming the run of `old_config`, with both values as text.

    The text is empty if `new_config` can resume the run.
    """
    fields = _changed_fields(identity_fields(old_config), identity_fields(new_config), "")
    return ", ".join(f"{name} = {old!r} in the run, {new!r} now" for name, old, new in fields)


def _changed_fields(
    old_fields: dict[str, Any], new_fields: dict[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, old value, new value) of the fields that differ. `prefix` precedes all names."""
    for key in sorted(old_fields.keys() | new_fields.keys()):
        old, new, name = old_fields.get(key), new_fields.get(key), f"{prefix}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changed_fields(old, new, f"{name}.")
        elif old != new:
            yield name, old, new
