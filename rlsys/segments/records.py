"""Records: the tokens of samples in segments, append-only files beside rollouts.sqlite, and their reader.

    segments/EPOCH-WRITER-NUMBER.seg    records, one behind the other, little-endian:

        magic  checksum  kind  version  policy  sample  sequence  parent  start  tokens  routes  payload
        4 s    u32       u8    u8       u16     u64     u32       u32     u32    u32     u32     u32

        payload of TOKENS: ids int32[tokens], mu float64[tokens], routes (msgpack of RouteSpans, so many bytes)
        payload of SCORES: logp float32[tokens]
        payload of SUPPORT: rows of the ids that sampling had kept, one a token (rlsys/segments/support.py)
        payload of OPINIONS: what a teacher finds most probable in the place of each
        (rlsys/segments/teacher_logprobs.py)
        payload of ROUTES: see rlsys/segments/route_records.py; engines write these, into files of their own

`start` is the first token's place in its sequence. `sequence` and `parent` tell the sequences of one sample apart and
which of them each continues; `policy` whose tokens they are: today one.

The rollout process writes them (rlsys/ledger/segments.py). Whoever sees the run's folder reads them in place: a
trainer rank those of the samples that it trains.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import RunError
from rlsys.core.spans import Piece, RouteSpan
from rlsys.core.types import Sample

FOLDER = "segments"
_HEADER = struct.Struct("<4sIBBHQIIIIII")
HEADER_BYTES = _HEADER.size
_CHECKED_FROM = 8
"""The checksum is of all that comes after it."""
_MAGIC = b"rlsg"
_VERSION = 1
_NO_PARENT = 2**32 - 1
LARGEST = 2**32 - 1
"""Bytes of a payload: its length has 32 bits."""

T = TypeVar("T", bound=np.generic)


class Kind(IntEnum):
    TOKENS = 1
    SCORES = 2
    SUPPORT = 3
    ROUTES = 4
    OPINIONS = 5


class Record(NamedTuple):
    """Of one sequence of a sample, from token `start` on."""

    kind: Kind
    sample_id: int
    sequence: int
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


class Whose(NamedTuple):
    """The sequence that a record is of."""

    sample_id: int
    sequence: int = 0
    parent: int = _NO_PARENT

    @classmethod
    def of(cls, sample: Sample) -> Whose:
        return cls(sample.sample_id, sample.sequence, _NO_PARENT if sample.parent is None else sample.parent)


def encode(kind: Kind, whose: Whose, start: int, tokens: int, payload: bytes, routes: int = 0) -> bytes:
    """One record. `routes`: how many bytes of the payload, its last ones, are routes."""
    return head(kind, whose, start, tokens, len(payload), payload, routes) + payload


def head(
    kind: Kind, whose: Whose, start: int, tokens: int, length: int, checked: bytes, routes: int = 0
) -> bytes:
    """What a record begins with. `length`: bytes of its payload, of which the checksum is of `checked` alone."""
    rest = _HEADER.pack(_MAGIC, 0, kind, _VERSION, 0, *whose, start, tokens, routes, length)[_CHECKED_FROM:]
    checksum = zlib.crc32(checked, zlib.crc32(rest))
    return _MAGIC + checksum.to_bytes(4, "little") + rest


def decode(data: bytes, where: str) -> Record:
    """Raises RunError that begins with `where` when these are not the bytes that were written."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise RunError(f"{where}: damaged: no record begins there")
    _, checksum, kind, version, _, sample, sequence, _, start, tokens, routes, payload = _HEADER.unpack_from(
        data
    )
    if len(data) != _HEADER.size + payload or zlib.crc32(memoryview(data)[_CHECKED_FROM:]) != checksum:
        raise RunError(f"{where}: damaged: the record of sample {sample} has another checksum")
    if version != _VERSION:
        raise RunError(f"{where}: record version {version}, this rlsys reads {_VERSION}")
    return Record(Kind(kind), sample, sequence, start, tokens, routes, memoryview(data)[_HEADER.size :])


class Head(NamedTuple):
    """Of a record whose payload is read in parts. `checksum`: of the rest and of `routes` bytes of payload."""

    kind: Kind
    checksum: int
    start: int
    tokens: int
    routes: int
    rest: bytes

    def check(self, checked: bytes, where: str) -> None:
        """Raises RunError when head and these bytes are not those that were written."""
        if len(checked) != self.routes or zlib.crc32(checked, zlib.crc32(self.rest)) != self.checksum:
            raise RunError(f"{where}: damaged: the record has another checksum")


def decode_head(data: bytes, where: str) -> Head:
    """Not checked yet. Raises RunError when no record begins there, or one of another version."""
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        raise RunError(f"{where}: damaged: no record begins there")
    _, checksum, kind, version, _, _, _, _, start, tokens, routes, _ = _HEADER.unpack_from(data)
    if version != _VERSION or kind not in tuple(Kind):
        raise RunError(f"{where}: record version {version} of kind {kind}, this rlsys reads {_VERSION}")
    return Head(Kind(kind), checksum, start, tokens, routes, data[_CHECKED_FROM:HEADER_BYTES])


class Arrays(NamedTuple):
    """What a sample's pieces hold, by the names that its fields have."""

    response_ids: NDArray[np.int32]  # [tokens]
    mu: NDArray[np.float64]  # [tokens]
    behaviour: NDArray[np.float32]  # of the first tokens; NaN: not scored
    routes: list[RouteSpan]
    support: bytearray  # a row of kept ids for each token; empty: sampling kept all
    teacher_logprobs: bytes  # a teacher's, of each token; empty: none was asked


class SegmentReader:
    """Reads records in place, beside the writer. Keeps files open until `close`, which ends its `with` block. It may
    be used again after that."""

    def __init__(self, folder: Path, reader: str = "") -> None:
        """`folder`: the run's, where rollouts.sqlite is. `reader`: who it is, named in errors."""
        self._folder = folder / FOLDER
        self._reader = reader and f"{reader}: "
        self._open: dict[str, int] = {}
        self.bytes_read = 0

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """All files; the next read opens what it needs."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, piece: Piece) -> Record:
        """Raises RunError: the file is not there, or damaged."""
        return decode(
            self.bytes_at(*piece), f"{self._reader}{self._folder / piece.segment} at {piece.offset}"
        )

    def bytes_at(self, segment: str, offset: int, length: int) -> bytes:
        """Fewer where the file ends before. Raises RunError: it is not there, or cannot be read."""
        path = self._folder / segment
        try:
            if segment not in self._open:
                self._open[segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._open[segment], length, offset)
            while len(data) < length and (
                more := os.pread(self._open[segment], length - len(data), offset + len(data))
            ):  # one call reads 2 GiB at most
                data += more
        except FileNotFoundError:
            raise RunError(
                f"{self._reader}{path}: no such file; each machine that trains must see run.dir"
            ) from None
        except OSError as e:
            raise RunError(f"{self._reader}{path}: {e.strerror}") from None
        self.bytes_read += len(data)
        return data

    def arrays(self, sample: Sample) -> Arrays | Sample:
        """What has its tokens: the sample itself, or what is read of all its pieces. Raises RunError as `read`, and
        when they are not those of the sample."""
        if len(sample.response_ids) == sample.tokens:
            return sample
        records = [self.read(piece) for piece in sample.pieces]
        own_place = sample.sample_id, sample.sequence
        if strange := [p for r in records if (p := (r.sample_id, r.sequence)) != own_place]:
            raise RunError(
                f"sample {sample.sample_id}: the ledger points at a record of sample {strange[0][0]}"
                + f", sequence {strange[0][1]}" * (strange[0][0] == sample.sample_id)
            )
        wanted = Kind.TOKENS, Kind.SCORES, Kind.SUPPORT, Kind.OPINIONS
        own, scores, kept, taught = ([r for r in records if r.kind is kind] for kind in wanted)
        if (found := sum(r.tokens for r in own)) != sample.tokens:
            raise RunError(
                f"sample {sample.sample_id}: {sample.tokens} tokens in the ledger, but {found} are kept"
            )
        if strange_opinions := [r.tokens for r in taught if (r.start, r.tokens) != (0, sample.tokens)]:
            raise RunError(
                f"sample {sample.sample_id}: a teacher's opinions of {strange_opinions[0]} tokens, but it has "
                f"{sample.tokens}"
            )
        behaviour = np.full(max((r.start + r.tokens for r in scores), default=0), np.nan, np.float32)
        for record in scores:
            behaviour[record.start : record.start + record.tokens] = record.logp()
        routes = [span for r in own for span in msgspec.msgpack.decode(r.route_bytes(), type=list[RouteSpan])]
        routes.sort(key=lambda span: span.start)  # those that an engine wrote come in a record of their own
        return Arrays(
            _joined([r.ids() for r in own], np.int32), _joined([r.mu() for r in own], np.float64), behaviour, routes,
            bytearray().join(r.payload for r in kept), bytes(taught[-1].payload) if taught else b"",
        )  # fmt: skip

    def loaded(self, sample: Sample) -> Sample:
        """The same with its tokens in hand, those of all its sequences; routes that an engine wrote stay where they
        are. Raises RunError as `arrays`."""
        further = [self.loaded(q) for q in sample.extra_sequences]
        if isinstance(arrays := self.arrays(sample), Sample):
            return replace(sample, extra_sequences=further) if further else sample
        ids, mu, behaviour, routes, support, opinions = arrays
        out = replace(
            sample, response_ids=token_ids(), mu=log_probs(), behaviour=behaviour.tolist(), routes=routes,
            support=support, teacher_logprobs=opinions, pieces=[], extra_sequences=further,
        )  # fmt: skip
        out.response_ids.frombytes(ids.astype(np.intc).tobytes())
        out.mu.frombytes(mu.astype(np.double).tobytes())
        return out


def _joined(parts: Sequence[NDArray[T]], kind: type[T]) -> NDArray[T]:
    return np.concatenate(parts) if parts else np.empty(0, kind)
