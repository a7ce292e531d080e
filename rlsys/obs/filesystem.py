"""Type of the file system of a path: whether its locks and shared memory work across machines."""

from __future__ import annotations

import os
from pathlib import Path

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "rootfs",
        "tmpfs", "xfs", "zfs",
    }
)  # fmt: skip
"""File systems of one machine. All others count as shared: NFS, Lustre, GPFS, BeeGFS, FUSE, 9p, and unknown ones."""
UNKNOWN = "unknown"
_MOUNTS = Path("/proc/self/mountinfo")


def kind_of(path: Path) -> str:
    """Return the type of the mount that contains `path`, such as `ext4` or `nfs4`; `unknown` if unavailable."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return UNKNOWN
    return kind_in(lines, Path(os.path.realpath(path)))


def kind_in(mountinfo: list[str], path: Path) -> str:
    """Return `kind_of` from the lines of /proc/PID/mountinfo. `path` has no symbolic links.

    See proc_pid_mountinfo(5).
    """
    longest, kind = -1, UNKNOWN
    for line in mountinfo:
        fields, dash, source_fields = line.partition(" - ")
        if not dash:
            continue
        point = fields.split(" ")[4]
        for escape in (
            "040",
            "011",
            "012",
            "134",
        ):  # blank, tab, line feed, backslash: as the kernel writes them
            point = point.replace("\\" + escape, chr(int(escape, 8)))
        if (
            path.is_relative_to(point) and len(point) >= longest
        ):  # of two mounts on one point the later one counts
            longest, kind = len(point), source_fields.split(" ")[0]
    return kind


def is_local(path: Path) -> bool:
    """Return whether no other machine can open `path`; False if unknown."""
    return kind_of(path) in LOCAL
