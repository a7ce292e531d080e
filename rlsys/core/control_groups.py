"""Control groups (cgroup v2): the group of this process, and new groups with common limits, which are killed as a
whole."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROLLERS = frozenset(("memory", "pids", "cpu"))
_PREFIX = "rlsys-limited-"
_POLL_SECONDS = 0.02
_EMPTY_SECONDS = 5.0
"""Maximum time in seconds in which killed processes leave their group."""


def current_group() -> Path | None:
    """Return the group of this process; None if no cgroup v2 hierarchy is mounted."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    relative_path = next((line[3:] for line in lines if line.startswith("0::/")), None)
    for mount in mounts:
        mount_fields, _, filesystem = mount.partition(" - ")
        if relative_path is not None and filesystem.startswith("cgroup2 "):
            root, point = mount_fields.split()[3:5]
            inside = os.path.relpath(relative_path, root)
            if not inside.startswith(".."):
                return Path(point) / inside
    return None


def kill(group: Path) -> None:
    """Kill all processes in the group and its subgroups, and wait until they have left it."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + _EMPTY_SECONDS
        while "populated 1" in (group / "cgroup.events").read_text() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


@functools.cache
def limiting_group() -> Path | None:
    """Return the nearest group in which this process can create subgroups with limits; None if there is none.

    The search starts at the group of this process. A suitable group contains no processes, or is the root group.
    """
    group = current_group()
    if group is None:
        return None
    with contextlib.suppress(OSError):
        (group / "cgroup.subtree_control").write_text("+memory +pids +cpu")
    for candidate in (group, *group.parents):
        with contextlib.suppress(OSError):
            enabled = set((candidate / "cgroup.subtree_control").read_text().split())
            if enabled >= CONTROLLERS:
                _remove_leftovers(candidate)
                with _new_group(candidate, {}) as command_prefix:
                    if subprocess.run([*command_prefix, "true"], capture_output=True).returncode == 0:
                        return candidate
    return None


@contextmanager
def limited(limits: Mapping[str, int | str]) -> Iterator[list[str]]:
    """Create a group with limits for the context, and kill its processes at the end.

    Args:
        limits: name of a control file of the group, for example memory.max -> value.

    Yields:
        the prefix of a command that starts a program in the group. Without a `limiting_group` it is empty, and there
        are no limits.
    """
    parent = limiting_group()
    if parent is None:
        yield []
    else:
        with _new_group(parent, limits) as command_prefix:
            yield command_prefix


@contextmanager
def _new_group(parent: Path, limits: Mapping[str, int | str]) -> Iterator[list[str]]:
    group = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    group.mkdir()
    try:
        for name, value in limits.items():
            (group / name).write_text(str(value))
        yield ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group / "cgroup.procs")]
    finally:
        kill(group)
        with contextlib.suppress(OSError):
            group.rmdir()


def _remove_leftovers(parent: Path) -> None:
    """Remove the subgroups that killed processes created."""
    for group in parent.glob(f"{_PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(_PREFIX).partition("-")[0]).exists():
            kill(group)
            with contextlib.suppress(OSError):
                group.rmdir()
