"""Whether a lock that one process holds keeps another one out: `python -m rlsys.obs.lock_probe FOLDER`.

Asked in another process, or on another node of a Slurm job: file systems that keep locks to one machine (Lustre's
localflock, NFS with local_lock) show themselves only there. Both kinds of locks are tried, because a run folder's is
a flock and SQLite's are POSIX ones, and what rlsys.core.owner rests on: creating a file exclusively.
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

KINDS = ("flock", "posix", "create")
SRUN_SECONDS = 60.0


def examine_locks(folder: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """In words who tried what, and whether every lock kept the other process out. Raises OSError."""
    node = other_node(environment)
    where = f"node {node}" if node else "another process here"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rlsys-doctor-") as held, holding(Path(held)):
        command = [sys.executable, "-m", "rlsys.obs.lock_probe", held]
        if node:
            command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", *command]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SRUN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"locks: {where} gave no answer within {SRUN_SECONDS:g} s", False
    taken = done.stdout.split()
    if done.returncode:
        return f"locks: {where} could not try: {' '.join(done.stderr.split())[-200:]}", False
    if taken:
        return f"locks do NOT work: {where} took {', '.join(taken)} held here", False
    return f"locks work between here and {where}", True


def other_node(environment: Mapping[str, str]) -> str | None:
    """A second node of the Slurm job that this process is in; None outside of one, or in a job of one node."""
    names = environment.get("SLURM_JOB_NODELIST")
    if names is None or shutil.which("scontrol") is None:
        return None
    done = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True)
    here = {environment.get("SLURMD_NODENAME"), socket.gethostname()}
    return next((name for name in done.stdout.split() if name not in here), None)


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """One file of each kind, locked by this process; one that exists."""
    with (folder / "flock").open("w") as flock, (folder / "posix").open("w") as posix:
        fcntl.flock(flock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(posix, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "create").touch(exist_ok=False)
        yield


def taken(folder: Path) -> list[str]:
    """Which of the locks that somebody holds this process gets all the same."""
    got = []
    for kind, lock in (("flock", fcntl.flock), ("posix", fcntl.lockf)):
        with (folder / kind).open("r+") as file, contextlib.suppress(BlockingIOError, PermissionError):
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            got.append(kind)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / "create", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        got.append("create")
    return got


if __name__ == "__main__":
    print(*taken(Path(sys.argv[1])))
