"""Memory use of a role's processes, to explain a death by signal 9.

The keeper samples the memory every few seconds on the role's machine, and writes one line into the role's log when
the role fails. The supervisor, which may be on another machine, reads the line from the log.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from launch import cgroup

SECONDS = 2.0
"""Interval between samples."""
_MAX_SAMPLES = 10
"""Number of recent samples that are stored, because a process may have died some seconds before the role ends."""
_LINE = "rlsys: memory: "


@dataclass(frozen=True)
class MemorySample:
    """Memory at one time, in bytes.

    Attributes:
        largest: resident size of the role's largest process.
        free: free memory within the limit.
        limit: memory of the control group that limits the processes, or of the host.
        scope: `cgroup` or `host`.
    """

    largest: int
    free: int
    limit: int
    scope: str

    def __str__(self) -> str:
        gb = [f"{n / 1e9:.1f}" for n in (self.largest, self.free, self.limit)]
        return f"its largest process had {gb[0]} GB; {gb[1]} of {gb[2]} GB of the {self.scope} were free"


class MemoryUse:
    """Owns the recent samples of a role's processes."""

    def __init__(self) -> None:
        self._samples: deque[MemorySample] = deque(maxlen=_MAX_SAMPLES)

    def sample(self, processes: Iterable[psutil.Process]) -> None:
        """Sample the memory of processes of this machine. Processes that have ended are skipped."""
        largest = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                largest = max(largest, process.memory_info().rss)
        if largest:
            self._samples.append(MemorySample(largest, *_free_memory()))

    def line(self) -> str:
        """Return a log line about the sample with the largest process; empty without samples."""
        return f"{_LINE}{max(self._samples, key=lambda use: use.largest)}" if self._samples else ""


def parse_line(line: str) -> str | None:
    """Return the text of a line of MemoryUse.line; None for any other line."""
    return line.removeprefix(_LINE) if line.startswith(_LINE) else None


def _free_memory() -> tuple[int, int, str]:
    """Return the free memory in bytes, its limit, and the limit's scope, of the tightest limit for this process.

    The limits are those of the host, and of this process's control group and its parents.
    """
    host = psutil.virtual_memory()
    limits = [(host.available, host.total, "host")]
    group = cgroup.current_group()
    while group is not None and (group / "cgroup.controllers").is_file():
        with contextlib.suppress(
            OSError, ValueError
        ):  # the root has no file, and groups without a limit have "max"
            limit = int((group / "memory.max").read_text())
            limits.append((limit - int((group / "memory.current").read_text()), limit, "cgroup"))
        group = group.parent
    return min(limits)
