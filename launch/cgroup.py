"""A control group (cgroup v2) for a role's processes: one write kills them all, whoever their parents are by now.

Used where this user may make one: in a container with a cgroup file system of its own, in a systemd session that has
its part delegated, as root. Elsewhere guard and keeper find a role's processes one by one (launch/guard.py).

A group has the same name at each start of its role in one run folder. So a launch that finds processes in it, left by
one that was killed with all its guards and keepers, kills them before it starts its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

_LOOK_SECONDS = 0.02
_EMPTY_SECONDS = 5.0
"""A killed process may need a moment in the kernel before it has left."""


def group_name(run_dir: Path, role: str) -> str:
    """Of this folder's role on this machine, however the path is written."""
    found = run_dir.stat()
    return f"rlsys-{hashlib.sha256(f'{found.st_dev}:{found.st_ino}'.encode()).hexdigest()[:12]}-{role}"


def home() -> Path | None:
    """The group that this process is in; None where no tree of version 2 is mounted."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    own = next((line[3:] for line in lines if line.startswith("0::/")), None)
    for mount in mounts:
        where, _, what = mount.partition(" - ")
        if own is not None and what.startswith("cgroup2 "):
            root, point = where.split()[3:5]
            inside = os.path.relpath(own, root)
            if not inside.startswith(".."):
                return Path(point) / inside
    return None


def make(name: str) -> Path | None:
    """An empty group below this process's own; what an earlier one of the name held is killed. None: not here."""
    if (above := home()) is None:
        return None
    group = above / name
    try:
        group.mkdir(exist_ok=True)
    except OSError:
        return None
    if not (group / "cgroup.kill").exists():  # Linux before 5.14
        with contextlib.suppress(OSError):
            group.rmdir()
        return None
    kill(group)
    return group


def enter(group: Path) -> None:
    """Move this process there, with all that it starts from now on. Where that is refused, it stays where it is."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def kill(group: Path) -> None:
    """Kill every process in it, and wait until they have left. Harmless for a group that is gone."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + _EMPTY_SECONDS
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


def end(name: str) -> None:
    """Kill what is left of a role that this process started, and give its group up."""
    if (above := home()) is not None:
        kill(above / name)
        with contextlib.suppress(OSError):
            (above / name).rmdir()
