"""Segments: append-only files with the tokens of samples, beside rollouts.sqlite, whose rows point into them.

    segments/EPOCH-NUMBER.seg    records, one behind the other, little-endian:

        magic  checksum  kind  version  policy  sample  sequence  parent  start  tokens  routes  payload
        4 s    u32       u8    u8       u16     u64     u32       u32     u32    u32     u32     u32

        payload of TOKENS: ids int32[tokens], mu float64[tokens], routes (msgpack of RouteSpans, so many bytes)
        payload of SCORES: logp float32[tokens]

`start` is the first token's place in the response. `sequence` and `parent` tell the sequences of one sample apart and
which of them each continues; `policy` whose tokens they are: today one of each.

A file has one writer, which made it: a launch that takes a run over begins files of its own, so one that was deposed
can harm nothing. The order is: append, fsync, then the COMMIT of the rows that point there. What a kill cut off has
no row, so it is absent; how many bytes that were is counted at the next opening. A file goes when no row points into
it.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import zlib
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlsys.errors import RunError, UserError, disk_errors

FOLDER = "segments"
SEGMENT_BYTES = 64 * 2**20
"""A file that has so many gets no further record. What a late sample still needs keeps the whole file."""
_HEADER = struct.Struct("<4sIBBHQIIIIII")
_CHECKED_FROM = 8
"""The checksum is of all that comes after it."""
_MAGIC = b"rlsg"
_VERSION = 1
_NO_PARENT = 2**32 - 1


class Kind(IntEnum):
    TOKENS = 1
    SCORES = 2


class Place(NamedTuple):
    """Where a record lies: the segment's number, and bytes in its file."""

    segment: int
    offset: int
    length: int


class Record(NamedTuple):
    """Of one sample, from token `start` on. `columns`: the payload's bytes."""

    kind: Kind
    sample_id: int
    start: int
    tokens: int
    routes: int
    payload: memoryview

    def ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.payload, "<i4", self.tokens)

    def mu(self) -> NDArray[np.float64]:
        return np.frombuffer(self.payload, "<f8", self.tokens, 4 * self.tokens)

    def route_bytes(self) -> memoryview:
        return self.payload[12 * self.tokens :]

    def logp(self) -> NDArray[np.float32]:
        return np.frombuffer(self.payload, "<f4", self.tokens)


def encode(kind: Kind, sample_id: int, start: int, tokens: int, payload: bytes, routes: int = 0) -> bytes:
    """One record. `routes`: how many bytes of the payload, its last ones, are routes."""
    rest = _HEADER.pack(
        _MAGIC, 0, kind, _VERSION, 0, sample_id, 0, _NO_PARENT, start, tokens, routes, len(payload)
    )[_CHECKED_FROM:]
    checksum = zlib.crc32(payload, zlib.crc32(rest))
    return _MAGIC + checksum.to_bytes(4, "little") + rest + payload


def decode(data: bytes, where: str) -> Record:
    """Raises RunError that begins with `where` when these are not the bytes that were written."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise RunError(f"{where}: damaged: no record begins there")
    _, checksum, kind, version, _, sample, _, _, start, tokens, routes, payload = _HEADER.unpack_from(data)
    if len(data) != _HEADER.size + payload or zlib.crc32(data[_CHECKED_FROM:]) != checksum:
        raise RunError(f"{where}: damaged: the record of sample {sample} has another checksum")
    if version != _VERSION:
        raise RunError(f"{where}: record version {version}, this rlsys reads {_VERSION}")
    return Record(Kind(kind), sample, start, tokens, routes, memoryview(data)[_HEADER.size :])


class SegmentReader:
    """Reads records in place; keeps files open until it is closed. Anybody may, beside the writer."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the run's, where rollouts.sqlite is."""
        self._folder = folder / FOLDER
        self._open: dict[str, int] = {}

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, name: str, offset: int, length: int) -> Record:
        """Raises RunError: the file is gone or damaged."""
        path = self._folder / name
        with disk_errors(path):
            if name not in self._open:
                self._open[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._open[name], length, offset)
        return decode(data, f"{path} at {offset}")


class SegmentWriter:
    """Appends records for the transactions of `db`, whose table `segments` names the files.

    Raises RunError for what the disk refuses; then the caller writes nothing more.
    """

    def __init__(self, folder: Path, db: sqlite3.Connection, epoch: int, size: int = SEGMENT_BYTES) -> None:
        """`epoch`: of the launch that writes, 0 where there is none. `size`: see SEGMENT_BYTES."""
        self._folder = folder / FOLDER
        self._db = db
        self._epoch = epoch
        self._most = size
        self._fd = -1
        self._number = 0
        self._written = 0
        self._waiting = bytearray()
        self._unsynced = False
        self.unused: list[str] = []
        """Files that no row points into: `remove` deletes them."""

    def open(self) -> int:
        """Cuts off what earlier writers had not committed. Returns how many bytes that were.

        Raises UserError when a file that rows point into is not there, or not whole.
        """
        known: dict[str, int] = dict(self._db.execute("SELECT name, length FROM segments").fetchall())
        with disk_errors(self._folder, UserError):
            self._folder.mkdir(exist_ok=True)
            there = {entry.name: entry.stat().st_size for entry in os.scandir(self._folder)}
            for name, length in known.items():
                if there.get(name, -1) < length:
                    found = f"it has {there[name]}" if name in there else "it is not there"
                    raise UserError(
                        f"{self._folder / name}: {length} bytes of it are in use, but {found}; restore it"
                    )
                if there[name] > length:
                    os.truncate(self._folder / name, length)
            for name in there.keys() - known.keys():
                os.unlink(self._folder / name)
        return sum(size - known.get(name, 0) for name, size in there.items())

    def append(self, record: bytes) -> Place:
        """Inside a transaction. In memory until `write_out` or `sync`."""
        if self._fd < 0 or self._written + len(self._waiting) >= self._most:
            self._begin()
        place = Place(self._number, self._written + len(self._waiting), len(record))
        self._waiting += record
        return place

    def _begin(self) -> None:
        """A new file; the one before is whole on disk, and is not touched again."""
        self.sync()
        self.close()
        row = self._db.execute("SELECT coalesce(max(segment), 0) + 1 FROM segments").fetchone()
        self._number, self._written = int(row[0]), 0
        name = f"{self._epoch:06d}-{self._number:06d}.seg"
        with disk_errors(self._folder / name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._folder / name, flags, 0o644)
            _sync_folder(self._folder)
        self._db.execute("INSERT INTO segments VALUES (?, ?, 0)", (self._number, name))

    def write_out(self) -> None:
        """So that readers see it."""
        while self._waiting:
            with disk_errors(self._folder):
                done = os.write(self._fd, self._waiting)
            self._written += done
            del self._waiting[:done]
            self._unsynced = True

    def sync(self) -> None:
        """Everything that was appended is on disk when this returns; the COMMIT may follow."""
        self.write_out()
        if self._unsynced:
            with disk_errors(self._folder):
                os.fdatasync(self._fd)
            self._db.execute(
                "UPDATE segments SET length = ? WHERE segment = ?", (self._written, self._number)
            )
            self._unsynced = False

    def forget_unused(self) -> None:
        """Inside a transaction. Files without a row that points into them go after the COMMIT: `remove`."""
        unused = (
            "SELECT segment, name FROM segments WHERE segment != ? "
            "AND NOT EXISTS (SELECT 1 FROM pieces WHERE pieces.segment = segments.segment)"
        )
        for number, name in self._db.execute(unused, (self._number,)).fetchall():
            self._db.execute("DELETE FROM segments WHERE segment = ?", (number,))
            self.unused.append(name)

    def remove(self) -> None:
        """What `forget_unused` found. After the COMMIT."""
        while self.unused:
            with disk_errors(self._folder / self.unused[-1]):
                (self._folder / self.unused.pop()).unlink(missing_ok=True)

    def close(self) -> None:
        """What waits is dropped: without a COMMIT nobody has heard of it."""
        self._waiting.clear()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _sync_folder(folder: Path) -> None:
    """So that a power cut does not take a new file's name away."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
