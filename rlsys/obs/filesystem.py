"""Type of the file system of a path, and whether other machines may use the file system, too."""

from __future__ import annotations

import os
from pathlib import Path

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "rootfs",
        "tmpfs", "xfs", "zfs",
    }
)  # fmt: skip
"""Types of file systems of one machine. Others count as shared: NFS, Lustre, GPFS, BeeGFS, FUSE, 9p, unknown
types."""
UNKNOWN = "unknown"
_MOUNTS = Path("/proc/self/mountinfo")


def kind_of(path: Path) -> str:
    """Return the type of the file system that contains `path`, such as `ext4` or `nfs4`; UNKNOWN if unavailable."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return UNKNOWN
    return kind_in(lines, Path(os.path.realpath(path)))


def kind_in(mountinfo: list[str], path: Path) -> str:
    """Return the type of the file system that contains `path`; UNKNOWN if none does.

    Args:
        mountinfo: lines of /proc/PID/mountinfo (see proc_pid_mountinfo(5)).
        path: absolute path without symbolic links.
    """
    longest, kind = -1, UNKNOWN
    for line in mountinfo:
        fields, separator, source_fields = line.partition(" - ")
        if not separator:
            continue
        point = fields.split(" ")[4]
        for escape in ("040", "011", "012", "134"):  # the kernel escapes space, tab, line feed and backslash
            point = point.replace("\\" + escape, chr(int(escape, 8)))
        if (
            path.is_relative_to(point) and len(point) >= longest
        ):  # a later mount on the same point hides the earlier
            longest, kind = len(point), source_fields.split(" ")[0]
    return kind


def is_local(path: Path) -> bool:
    """Return whether only this machine can open `path`; False if the file system is unknown."""
    return kind_of(path) in LOCAL
