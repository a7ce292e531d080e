"""A control group (cgroup v2) for a role's processes: one write kills them all, whoever their parents are by now.

Used where this user may make one: in a container with a cgroup file system of its own, in a systemd session that has
its part delegated, as root. Elsewhere guard and keeper find a role's processes one by one (launch/guard.py).

A role's group has the same name at each start in one run folder, and each start has a group of its own inside it. So
a launch that finds processes there, left by one that was killed with all its guards and keepers, kills them before it
starts its own; and a keeper that ends late, after the next start, kills nothing but what was its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
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
    """An empty group for one start of a role; what earlier starts left is killed. None: not here."""
    if (above := home()) is None:
        return None
    role = above / name
    start = role / secrets.token_hex(4)
    try:
        role.mkdir(exist_ok=True)
        if not (role / "cgroup.kill").exists():  # Linux before 5.14
            role.rmdir()
            return None
        kill(role)
        _give_up(*role.glob("*/"))
        while not start.exists():  # a keeper that ends late may give the role's group up at this moment
            with contextlib.suppress(FileNotFoundError):
                start.mkdir(parents=True)
    except OSError:
        return None
    return start


def enter(group: Path) -> None:
    """Move this process there, with all that it starts from now on. Where that is refused, it stays where it is."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def kill(group: Path) -> None:
    """Kill every process in it and in the groups inside it, and wait until they have left. Harmless if it is gone."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + _EMPTY_SECONDS
        while "populated 1" in (group / "cgroup.events").read_text() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


def end_start(start: Path) -> None:
    """Kill what is left of one start, and give its group up; the role's group too, unless another start uses it."""
    kill(start)
    _give_up(start, start.parent)


def end(name: str) -> None:
    """Kill what is left of a role, whichever start it is from, and give its groups up."""
    if (above := home()) is None:
        return
    kill(above / name)
    _give_up(*(above / name).glob("*/"), above / name)


def _give_up(*groups: Path) -> None:
    """Those that hold no process and no group."""
    for group in groups:
        with contextlib.suppress(OSError):
            group.rmdir()
