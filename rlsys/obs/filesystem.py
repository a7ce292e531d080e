"""What kind of file system a path is on: whether its locks and its shared memory mean anything to other machines."""

from __future__ import annotations

import os
from pathlib import Path

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "rootfs",
        "tmpfs", "xfs", "zfs",
    }
)  # fmt: skip
"""Only one machine mounts these. Everything else is taken for shared: NFS, Lustre, GPFS, BeeGFS, FUSE, 9p, and what
nobody has told us of yet."""
UNKNOWN = "unknown"
_MOUNTS = Path("/proc/self/mountinfo")


def kind_of(path: Path) -> str:
    """The type of the mount that `path` is on, as `ext4` or `nfs4`; `unknown` where the system does not tell."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return UNKNOWN
    return kind_in(lines, Path(os.path.realpath(path)))


def kind_in(mountinfo: list[str], path: Path) -> str:
    """`kind_of` by the lines of /proc/PID/mountinfo (proc_pid_mountinfo(5)); `path` is without links."""
    longest, found = -1, UNKNOWN
    for line in mountinfo:
        before, dash, after = line.partition(" - ")
        if not dash:
            continue
        point = before.split(" ")[4]
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
            longest, found = len(point), after.split(" ")[0]
    return found


def is_local(path: Path) -> bool:
    """Whether no other machine can have `path` open. False where that cannot be told."""
    return kind_of(path) in LOCAL
