"""How much memory a role's processes use, and how much there is: what a death by signal 9 is explained with.

The keeper looks every few seconds, on the role's own machine, and writes one line into the role's log when the role
has failed; the supervisor, which may be on another machine, finds it there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from launch import cgroup

SECONDS = 2.0
"""Between two looks."""
_LOOKS = 10
"""That are kept: a process of the role's may be gone for some seconds before the role itself has ended."""
_LINE = "rlsys: memory: "


@dataclass(frozen=True)
class Use:
    """In bytes, at one moment. `largest`: of the role's processes, resident. `free` of `limit`: of the control group
    that limits them, or of the host."""

    largest: int
    free: int
    limit: int
    where: str

    def __str__(self) -> str:
        gb = [f"{n / 1e9:.1f}" for n in (self.largest, self.free, self.limit)]
        return f"its largest process had {gb[0]} GB; {gb[1]} of {gb[2]} GB of the {self.where} were free"


class MemoryUse:
    """Owns the last looks at a role's processes."""

    def __init__(self) -> None:
        self._looks: deque[Use] = deque(maxlen=_LOOKS)

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """At processes of this machine; those that have ended meanwhile count for nothing."""
        largest = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                largest = max(largest, process.memory_info().rss)
        if largest:
            self._looks.append(Use(largest, *_room()))

    def line(self) -> str:
        """For the log: the look at which a process was the largest; empty before the first one."""
        return f"{_LINE}{max(self._looks, key=lambda use: use.largest)}" if self._looks else ""


def parse_line(line: str) -> str | None:
    """What such a line says; None for any other line."""
    return line.removeprefix(_LINE) if line.startswith(_LINE) else None


def _room() -> tuple[int, int, str]:
    """Bytes free, limit, and whose: of the group above this process that leaves the least, or of the host."""
    host = psutil.virtual_memory()
    rooms = [(host.available, host.total, "host")]
    group = cgroup.home()
    while group is not None and (group / "cgroup.controllers").is_file():
        with contextlib.suppress(OSError, ValueError):  # the root has no limit, others say "max"
            limit = int((group / "memory.max").read_text())
            rooms.append((limit - int((group / "memory.current").read_text()), limit, "cgroup"))
        group = group.parent
    return min(rooms)
