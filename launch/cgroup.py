"""Control groups (cgroup v2) of a role's processes: one write kills all processes, independent of their parents.

A role has a control group if this user may create one: in a container with its own cgroup file system, in a systemd
session with delegation, or as root. Otherwise guard and keeper find a role's processes one by one (launch/guard.py).

A role's group has the same name at each start in one run folder, and contains one group per start. So a new start
kills the processes of an earlier launch whose guards and keepers were all killed, and a keeper that ends after the
next start kills only its own processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from pathlib import Path

from rlsys.core.control_groups import current_group, kill

__all__ = ["create", "current_group", "end", "end_start", "enter", "group_name", "kill"]


def group_name(run_dir: Path, role: str) -> str:
    """Return the name of a role's group. All paths of one run folder give the same name."""
    status = run_dir.stat()
    return f"rlsys-{hashlib.sha256(f'{status.st_dev}:{status.st_ino}'.encode()).hexdigest()[:12]}-{role}"


def create(name: str) -> Path | None:
    """Create an empty group for one start of a role, and kill the processes of earlier starts.

    Args:
        name: name of the role's group (group_name).

    Returns:
        Folder of the start's group; None if this user cannot create groups.
    """
    if (parent := current_group()) is None:
        return None
    role = parent / name
    start = role / secrets.token_hex(4)
    try:
        role.mkdir(exist_ok=True)
        if not (role / "cgroup.kill").exists():  # Linux before 5.14
            role.rmdir()
            return None
        kill(role)
        _remove(*role.glob("*/"))
        while not start.exists():  # a keeper that ends late may remove the role's group concurrently
            with contextlib.suppress(FileNotFoundError):
                start.mkdir(parents=True)
    except OSError:
        return None
    return start


def enter(group: Path) -> None:
    """Move this process into the group, which its future children inherit. If that fails, it stays in its group."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def end_start(start: Path) -> None:
    """Kill the remaining processes of one start and remove its group, and the role's group if it is empty."""
    kill(start)
    _remove(start, start.parent)


def end(name: str) -> None:
    """Kill the remaining processes of all starts of a role, and remove its groups."""
    if (parent := current_group()) is None:
        return
    kill(parent / name)
    _remove(*(parent / name).glob("*/"), parent / name)


def _remove(*groups: Path) -> None:
    """Remove the groups that contain neither processes nor groups."""
    for group in groups:
        with contextlib.suppress(OSError):
            group.rmdir()
