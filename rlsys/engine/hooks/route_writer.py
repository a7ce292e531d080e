"""The engine's end of routes out of band: it writes them into the run's folder, and answers with pointers.

Each process of an engine that answers requests has files of its own, in a folder of this start of the engine. So
nothing is shared, and nothing that another process wrote is touched. What a kill cut off has no pointer.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.core.errors import RlsysError
from rlsys.core.owner import owner_of_process
from rlsys.obs.filesystem import is_local
from rlsys.segments.route_records import ROUTES_VARIABLE, RouteFile, encode, pointer

SEGMENT_BYTES = 64 * 2**20
"""A file that has so many gets no further record."""

log = logging.getLogger("rlsys.engine")


class RouteWriter:
    """Of one process of the engine. Its next file is made with the first record that needs it."""

    def __init__(
        self, folder: Path, epoch: int, unit: str, start: int, rank: int, size: int = SEGMENT_BYTES
    ) -> None:
        """`folder`: the run's segments. `size`: see SEGMENT_BYTES."""
        self._folder = folder
        self._file = RouteFile(epoch, unit, start, rank, 0)
        self._most = size
        self._fd = -1
        self._written = 0
        self._shared = not is_local(folder)

    def append(self, experts: NDArray[np.integer], start: int) -> bytes:
        """The pointer to experts `[positions, layers, topk]`, of positions from `start` on, once others can read it.

        Raises OSError when the disk refuses; the next record then goes into another file. ValueError for more than a
        record holds.
        """
        record = encode(experts, start)
        if self._fd < 0 or self._written >= self._most:
            self._begin()
        where, rest = self._written, memoryview(record)
        try:
            while rest:
                done = os.write(self._fd, rest)
                self._written += done
                rest = rest[done:]
            if self._shared:  # other machines see it from then on; on one machine the rollout process syncs
                os.fdatasync(self._fd)
        except OSError:
            self._take_back(where)
            raise
        return pointer(self._file.name, where, record)

    def _take_back(self, where: int) -> None:
        """What is in the file from there on: a full disk shall not fill with parts of records and empty files."""
        with contextlib.suppress(OSError):  # then they stay, and are counted when the file goes
            if where:
                os.ftruncate(self._fd, where)
            else:
                (self._folder / self._file.name).unlink()
        self._written = self._most

    def _begin(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        f = self._file
        self._file = RouteFile(f.epoch, f.unit, f.start, f.rank, f.number + 1)
        path = self._folder / self._file.name
        path.parent.mkdir(exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._written = 0
        try:
            for folder in (path.parent, self._folder):  # a power cut must not take the new names away
                _sync_folder(folder)
        except OSError:
            self._take_back(0)
            raise


def route_writer(rank: int, environment: Mapping[str, str] = os.environ) -> RouteWriter | None:
    """Of process `rank` of the engine that this environment is of.

    None: no run started it, or its machine does not see the run's folder; then routes go into the answers.
    """
    if not (unit := environment.get(ROUTES_VARIABLE)):
        return None
    path = Path(unit)
    try:
        owner, start = owner_of_process(
            path.parent.parent, environment
        )  # a folder of the same name lacks this launch
        path.parent.mkdir(exist_ok=True)
    except (RlsysError, OSError) as e:
        log.warning("routes go into the answers, since this engine cannot write into %s: %s", path.parent, e)
        return None
    return RouteWriter(path.parent, owner.epoch, path.name, start, rank)


def _sync_folder(folder: Path) -> None:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(at)
    finally:
        os.close(at)
