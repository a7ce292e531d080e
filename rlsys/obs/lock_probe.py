"""Check whether file locks in a folder exclude other processes: `python -m rlsys.obs.lock_probe FOLDER`.

The command tries to acquire locks that `examine_locks` holds. It runs on another node of the Slurm job if there is
one, because file systems with local locks (Lustre's localflock, NFS with local_lock) exclude processes of the same
node only. It tries a flock, which protects the run folder, a POSIX lock, which SQLite uses, and exclusive creation of
a file, on which rlsys.core.owner relies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlsys.core.imports import module_command

KINDS = ("flock", "posix", "create")
SRUN_SECONDS = 60.0


def examine_locks(folder: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """Check whether locks in a folder exclude another process, on another node of the Slurm job if there is one.

    Returns:
        a description of the result for users, and whether all locks excluded the other process.

    Raises:
        OSError: the folder is not writable.
    """
    node = other_node(environment)
    location = f"node {node}" if node else "another process here"
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".rlsys-doctor-") as lock_folder,
        hold_locks(Path(lock_folder)),
    ):
        command = module_command("rlsys.obs.lock_probe", lock_folder)
        if node:
            command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", *command]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=SRUN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"locks: {location} did not respond within {SRUN_SECONDS:g} s", False
    acquired = result.stdout.split()
    if result.returncode:
        return f"locks: {location} could not try: {' '.join(result.stderr.split())[-200:]}", False
    if acquired:
        return f"locks do NOT work: {location} took {', '.join(acquired)} held here", False
    return f"locks work between here and {location}", True


def other_node(environment: Mapping[str, str]) -> str | None:
    """Return the name of another node of this process's Slurm job; None if there is no job or no other node."""
    names = environment.get("SLURM_JOB_NODELIST")
    if names is None or shutil.which("scontrol") is None:
        return None
    result = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True)
    own_names = {environment.get("SLURMD_NODENAME"), socket.gethostname()}
    return next((name for name in result.stdout.split() if name not in own_names), None)


@contextlib.contextmanager
def hold_locks(folder: Path) -> Iterator[None]:
    """Hold one lock of each kind for the context, and create the file `create`."""
    with (folder / "flock").open("w") as flock, (folder / "posix").open("w") as posix:
        fcntl.flock(flock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(posix, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "create").touch(exist_ok=False)
        yield


def acquire_locks(folder: Path) -> list[str]:
    """Try to acquire the locks that another process holds with `hold_locks`; return the kinds of acquired ones."""
    acquired = []
    for kind, lock in (("flock", fcntl.flock), ("posix", fcntl.lockf)):
        with (folder / kind).open("r+") as file, contextlib.suppress(BlockingIOError, PermissionError):
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            acquired.append(kind)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / "create", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        acquired.append("create")
    return acquired


if __name__ == "__main__":
    print(*acquire_locks(Path(sys.argv[1])))
