"""Writer of routed experts in an engine: records in the run's folder, pointers in responses.

Each engine process that sends responses has its own files, in a folder for this start of the engine, so no other
process modifies them. A record that a kill truncated has no pointer.
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
"""A file of at least this number of bytes gets no more records."""

log = logging.getLogger("rlsys.engine")


class RouteWriter:
    """Writes the records of one engine process. The first record that needs a file creates it."""

    def __init__(
        self, folder: Path, epoch: int, unit: str, start: int, rank: int, size: int = SEGMENT_BYTES
    ) -> None:
        """Create a writer without opening a file.

        Args:
            folder: The run's folder of segments.
            epoch: Epoch of the run's owner.
            unit: Name of the engine.
            start: Number of the engine's start.
            rank: Tensor-parallel rank of the process.
            size: A file of at least this number of bytes gets no more records.
        """
        self._folder = folder
        self._file = RouteFile(epoch, unit, start, rank, 0)
        self._max_bytes = size
        self._fd = -1
        self._file_bytes = 0
        self._shared = not is_local(folder)

    def append(self, experts: NDArray[np.integer], start: int) -> bytes:
        """Write a record and return the pointer to it. Other processes can then read the record.

        Args:
            experts: `[positions, layers, topk]`.
            start: Position of the first row in the sequence.

        Raises:
            OSError: The write failed. The next record goes to another file.
            ValueError: The experts exceed the limits of a record.
        """
        record = encode(experts, start)
        if self._fd < 0 or self._file_bytes >= self._max_bytes:
            self._open_next()
        offset = self._file_bytes
        data = memoryview(record)
        try:
            while data:
                size = os.write(self._fd, data)
                self._file_bytes += size
                data = data[size:]
            if (
                self._shared
            ):  # otherwise other machines do not see it; on one machine the rollout process syncs
                os.fdatasync(self._fd)
        except OSError:
            self._truncate(offset)
            raise
        return pointer(self._file.name, offset, record)

    def _truncate(self, offset: int) -> None:
        """Remove the partial record of a failed write, and an empty file, to free space on a full disk.

        The file gets no more records.

        Args:
            offset: Size of the file in bytes before the write.
        """
        with contextlib.suppress(OSError):  # the partial record then remains, and no pointer refers to it
            if offset:
                os.ftruncate(self._fd, offset)
            else:
                (self._folder / self._file.name).unlink()
        self._file_bytes = self._max_bytes

    def _open_next(self) -> None:
        """Close the current file, and create the next one durably."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        f = self._file
        self._file = RouteFile(f.epoch, f.unit, f.start, f.rank, f.number + 1)
        path = self._folder / self._file.name
        path.parent.mkdir(exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._file_bytes = 0
        try:
            for folder in (path.parent, self._folder):  # a power failure must not lose the new names
                _sync_folder(folder)
        except OSError:
            self._truncate(0)
            raise


def route_writer(rank: int, environment: Mapping[str, str] = os.environ) -> RouteWriter | None:
    """Create the writer of an engine process.

    Args:
        rank: Tensor-parallel rank of the process.
        environment: Environment variables of the engine.

    Returns:
        None if no run started the engine, or its machine does not have the run's folder. Responses then contain the
            routed experts.
    """
    if not (unit := environment.get(ROUTES_VARIABLE)):
        return None
    path = Path(unit)
    try:
        # Raises an error if the path is a folder on a disk of this machine that is not the run's.
        owner, start = owner_of_process(path.parent.parent, environment)
        path.parent.mkdir(exist_ok=True)
    except (RlsysError, OSError) as e:
        log.warning(
            "responses contain routed experts, because this engine cannot write to %s: %s", path.parent, e
        )
        return None
    return RouteWriter(path.parent, owner.epoch, path.name, start, rank)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
