"""The folder of a run: one owner at a time (a lock), one config for its whole life.

The lock is a flock that the supervisor takes and its keepers inherit: it is free again only when every
process of the run has ended, also after a kill -9 of the supervisor. It keeps a second launch waiting where it works;
what keeps an old launch from writing where it does not, or after a pause, is the epoch of rlsys.core.owner.
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

from rlsys.config import Config, dump_config, identity_fields, load_config
from rlsys.core.errors import UserError, disk_errors
from rlsys.core.owner import Owner, claim
from rlsys.core.sockets import make_folder, remove_folder
from rlsys.obs.metrics import FILE_NAME as METRICS_FILE

DEAD_HOST_SECONDS = 120.0
"""A file server keeps the locks of a machine that is gone for its lease, 90 s for NFS."""
_LOCK = ".lock"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class RunDir:
    """A locked run folder. Processes that belong to the run inherit `lock_fd`."""

    path: Path
    lock_fd: int
    resumed: bool
    owner: Owner
    starts: Counter[str] = field(default_factory=Counter)
    """Starts of each role in this launch; a supervisor that replaces another counts on."""

    def log(self, name: str) -> Path:
        return self.path / "logs" / name


@contextlib.contextmanager
def open_run_dir(config: Config, say: Callable[[str], None]) -> Iterator[RunDir]:
    """Create or reopen the folder, for this user or for its group too, and write its config.

    Raises UserError when it holds a run of another config, something else, or a run that is in use.
    `say` is told when the processes of a dead supervisor are waited for.
    """
    path = config.run.dir
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"run.dir = {path}: cannot create it: {e.strerror}") from None
    with disk_errors(path, UserError):
        if path.stat().st_uid == os.geteuid():  # a folder of somebody else's has the mode that he gave it
            path.chmod(0o750 if config.run.share == "group" else 0o700)
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with disk_errors(path, UserError):
            _lock(fd, config, say)
            resumed = _check_contents(config)
            (path / "logs").mkdir(exist_ok=True)
            write_whole(path / CONFIG_FILE, dump_config(config))
        sockets = make_folder()
        try:
            yield RunDir(path, fd, resumed, claim(path, sockets))
        finally:
            remove_folder(sockets)
    finally:
        os.close(fd)


def _lock(fd: int, config: Config, say: Callable[[str], None]) -> None:
    begin, said = time.monotonic(), False
    while not _try_lock(fd):
        pid, _, host = os.pread(fd, 300, 0).decode().strip().partition(" ")
        elsewhere = host not in ("", socket.gethostname())
        patience = DEAD_HOST_SECONDS if elsewhere else 2 * config.launch.grace_seconds
        alive = not elsewhere and pid.isdigit() and psutil.pid_exists(int(pid))
        if alive or time.monotonic() - begin > patience:
            raise UserError(
                f"run.dir = {config.run.dir}: in use by process {pid or 'unknown'}{f' of {host}' * elsewhere}"
            )
        if not said:
            say("waiting for the processes of an earlier, killed run to end")
            said = True
        time.sleep(0.2)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_contents(config: Config) -> bool:
    """Whether there is a run of this config to go on with; one that never began binds nobody to its config."""
    path = config.run.dir
    if not (path / CONFIG_FILE).exists():
        ours = (_LOCK, "logs", _part(path / CONFIG_FILE).name)  # of a start that the disk refused
        foreign = sorted(p.name for p in path.iterdir() if p.name not in ours)
        if foreign:
            raise UserError(
                f"run.dir = {path}: holds {foreign[0]} but no {CONFIG_FILE}; choose another folder"
            )
        return False
    if not _begun(path):
        return False
    if changed := differences(load_config(path / CONFIG_FILE), config):
        raise UserError(f"run.dir = {path}: holds a run of another config ({changed}); choose another folder")
    return True


def _begun(path: Path) -> bool:
    """The trainer writes its first line before the first token is generated."""
    metrics = path / METRICS_FILE
    return (metrics.exists() and metrics.stat().st_size > 0) or (path / "checkpoints").exists()


def differences(there: Config, here: Config) -> str:
    """The fields that keep `here` from going on with the run of `there`, with both values."""
    changed = _changed(identity_fields(there), identity_fields(here), "")
    return ", ".join(f"{name} = {old!r} there, {new!r} here" for name, old, new in changed)


def _changed(there: dict[str, Any], here: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(there.keys() | here.keys()):
        old, new, name = there.get(key), here.get(key), f"{prefix}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changed(old, new, f"{name}.")
        elif old != new:
            yield name, old, new


def write_whole(path: Path, text: str) -> None:
    """Replace `path` in one step: a crash leaves the old text or the new."""
    part = _part(path)
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")
