"""Record format of segments, append-only files beside rollouts.sqlite that hold the tokens of samples; its reader.

    segments/EPOCH-WRITER-NUMBER.seg    a sequence of records, little-endian:

        magic  checksum  kind  version  policy  sample  sequence  parent  start  tokens  routes  payload
        4 s    u32       u8    u8       u16     u64     u32       u32     u32    u32     u32     u32

        payload of TOKENS: ids int32[tokens], mu float64[tokens], routes (`routes` bytes: msgpack of RouteSpans)
        payload of SCORES: logp float32[tokens]
        payload of SUPPORT: for each token, the ids that sampling did not mask (rlsys/segments/support.py)
        payload of TEACHER_LOGPROBS: a teacher's top-k log-probs at each token (rlsys/segments/teacher_logprobs.py)
        payload of ROUTES: see rlsys/segments/route_records.py; engines write these into files of their own

`start` is the position of the first token in its sequence. `sequence` numbers the sequences of one sample, and
`parent` is the sequence that it continues. `policy` is reserved for several policies; it is 0.

The rollout process writes the records (rlsys/ledger/segments.py). Processes with access to the run folder read
them in place: a trainer rank reads those of the samples that it trains on.
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
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlsys.core.arrays import log_probs, token_ids
from rlsys.core.errors import RunError
from rlsys.core.spans import Piece, RouteSpan
from rlsys.core.types import AnySequence, Sample, TokenSequence

FOLDER = "segments"
_HEADER = struct.Struct("<4sIBBHQIIIIII")
HEADER_BYTES = _HEADER.size
_CHECKSUM_START = 8
"""Offset of the first byte that the checksum covers."""
_MAGIC = b"rlsg"
_VERSION = 1
_NO_PARENT = 2**32 - 1
MAX_PAYLOAD_BYTES = 2**32 - 1
"""Largest payload: its length is stored in 32 bits."""

T = TypeVar("T", bound=np.generic)


class Kind(IntEnum):
    TOKENS = 1
    SCORES = 2
    SUPPORT = 3
    ROUTES = 4
    TEACHER_LOGPROBS = 5


class Record(NamedTuple):
    """A decoded record of one sequence: its tokens from `start` on."""

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


class SequenceKey(NamedTuple):
    """The sequence that a record belongs to."""

    sample_id: int
    sequence: int = 0
    parent: int = _NO_PARENT

    @classmethod
    def of(cls, sample: TokenSequence) -> SequenceKey:
        return cls(sample.sample_id, sample.sequence, _NO_PARENT if sample.parent is None else sample.parent)


def encode(kind: Kind, key: SequenceKey, start: int, tokens: int, payload: bytes, routes: int = 0) -> bytes:
    """Encode one record.

    Args:
        key: the sequence.
        start: position of the first token in the sequence.
        tokens: number of tokens.
        payload: see the header of this file.
        routes: size in bytes of the routes, which end the payload.
    """
    return encode_header(kind, key, start, tokens, len(payload), payload, routes) + payload


def encode_header(
    kind: Kind, key: SequenceKey, start: int, tokens: int, length: int, checksummed: bytes, routes: int = 0
) -> bytes:
    """Encode the header of a record whose payload is written separately.

    Args:
        length: bytes of the payload.
        checksummed: the part of the payload that the checksum covers.
    """
    header = _HEADER.pack(_MAGIC, 0, kind, _VERSION, 0, *key, start, tokens, routes, length)[_CHECKSUM_START:]
    checksum = zlib.crc32(checksummed, zlib.crc32(header))
    return _MAGIC + checksum.to_bytes(4, "little") + header


def decode(data: bytes, location: str) -> Record:
    """Decode and verify one record.

    Args:
        location: file and offset, for error messages.

    Raises:
        RunError: the bytes are not those that were written, or have another version.
    """
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise RunError(f"{location}: damaged: no record starts here")
    _, checksum, kind, version, _, sample, sequence, _, start, tokens, routes, payload = _HEADER.unpack_from(
        data
    )
    if len(data) != _HEADER.size + payload or zlib.crc32(memoryview(data)[_CHECKSUM_START:]) != checksum:
        raise RunError(f"{location}: damaged: checksum mismatch in the record of sample {sample}")
    if version != _VERSION:
        raise RunError(f"{location}: record version {version}, this rlsys reads {_VERSION}")
    return Record(Kind(kind), sample, sequence, start, tokens, routes, memoryview(data)[_HEADER.size :])


class RecordHeader(NamedTuple):
    """Header of a record whose payload is read in parts.

    `checksum` covers `header` and the first `routes` bytes of the payload.
    """

    kind: Kind
    checksum: int
    start: int
    tokens: int
    routes: int
    header: bytes

    def check(self, checksummed: bytes, location: str) -> None:
        """Verify the checksum of the header and of these bytes of the payload.

        Raises:
            RunError: they are not those that were written.
        """
        if (
            len(checksummed) != self.routes
            or zlib.crc32(checksummed, zlib.crc32(self.header)) != self.checksum
        ):
            raise RunError(f"{location}: damaged: checksum mismatch in the header of the record")


def decode_header(data: bytes, location: str) -> RecordHeader:
    """Decode a header without verifying its checksum.

    Raises:
        RunError: the bytes are no header, or one of another version.
    """
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        raise RunError(f"{location}: damaged: no record starts here")
    _, checksum, kind, version, _, _, _, _, start, tokens, routes, _ = _HEADER.unpack_from(data)
    if version != _VERSION or kind not in tuple(Kind):
        raise RunError(f"{location}: record version {version} of kind {kind}, this rlsys reads {_VERSION}")
    return RecordHeader(Kind(kind), checksum, start, tokens, routes, data[_CHECKSUM_START:HEADER_BYTES])


class TokenArrays(NamedTuple):
    """The arrays stored in a sample's pieces, under the names of the fields of Sample."""

    response_ids: NDArray[np.int32]  # [tokens]
    mu: NDArray[np.float64]  # [tokens]
    behaviour: NDArray[np.float32]  # [<= tokens], the trainer's log-probs; NaN: not scored
    routes: list[RouteSpan]
    support: bytearray  # sampling mask of each token; empty: sampling masked no id
    teacher_logprobs: bytes  # top-k of each token; empty: no teacher engine


class SegmentReader:
    """Reads records in place, while the writer may still append.

    Files stay open until `close` or the end of the `with` block. A closed reader can be used again.
    """

    def __init__(self, folder: Path, reader: str = "") -> None:
        """Create a reader; files are opened by reads.

        Args:
            folder: the run folder, which contains rollouts.sqlite.
            reader: the name of the reading process, for error messages.
        """
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
        """Close all files. A later read opens the files it needs."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, piece: Piece) -> Record:
        """Read and verify one record.

        Raises:
            RunError: the file is missing or damaged.
        """
        return decode(
            self.bytes_at(*piece), f"{self._reader}{self._folder / piece.segment} at {piece.offset}"
        )

    def bytes_at(self, segment: str, offset: int, length: int) -> bytes:
        """Read `length` bytes at `offset`, or fewer at the end of the file.

        Raises:
            RunError: the file is missing or unreadable.
        """
        path = self._folder / segment
        try:
            if segment not in self._open:
                self._open[segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._open[segment], length, offset)
            while len(data) < length and (
                chunk := os.pread(self._open[segment], length - len(data), offset + len(data))
            ):  # one call reads at most 2 GiB
                data += chunk
        except FileNotFoundError:
            raise RunError(
                f"{self._reader}{path}: no such file; each machine that trains must see run.dir"
            ) from None
        except OSError as e:
            raise RunError(f"{self._reader}{path}: {e.strerror}") from None
        self.bytes_read += len(data)
        return data

    def arrays(self, sample: TokenSequence) -> TokenArrays | TokenSequence:
        """Return the holder of the sequence's tokens: the sequence itself, or the arrays read from its pieces.

        Raises:
            RunError: a file is missing or damaged, or its records do not belong to the sequence.
        """
        if len(sample.response_ids) == sample.tokens:
            return sample
        records = [self.read(piece) for piece in sample.pieces]
        expected = sample.sample_id, sample.sequence
        if foreign := [p for r in records if (p := (r.sample_id, r.sequence)) != expected]:
            raise RunError(
                f"sample {sample.sample_id}: the ledger points at a record of sample {foreign[0][0]}"
                + f", sequence {foreign[0][1]}" * (foreign[0][0] == sample.sample_id)
            )
        kinds = Kind.TOKENS, Kind.SCORES, Kind.SUPPORT, Kind.TEACHER_LOGPROBS
        tokens, scores, masks, teacher = ([r for r in records if r.kind is kind] for kind in kinds)
        if (stored_tokens := sum(r.tokens for r in tokens)) != sample.tokens:
            raise RunError(
                f"sample {sample.sample_id}: {sample.tokens} tokens in the ledger, but {stored_tokens} in its "
                "segments"
            )
        if mismatched := [r.tokens for r in teacher if (r.start, r.tokens) != (0, sample.tokens)]:
            raise RunError(
                f"sample {sample.sample_id}: teacher log-probs of {mismatched[0]} tokens; expected {sample.tokens}"
            )
        behaviour = np.full(max((r.start + r.tokens for r in scores), default=0), np.nan, np.float32)
        for record in scores:
            behaviour[record.start : record.start + record.tokens] = record.logp()
        routes = [
            span for r in tokens for span in msgspec.msgpack.decode(r.route_bytes(), type=list[RouteSpan])
        ]
        routes.sort(key=lambda span: span.start)  # routes written by an engine have a record of their own
        return TokenArrays(
            _concatenate([r.ids() for r in tokens], np.int32), _concatenate([r.mu() for r in tokens], np.float64),
            behaviour, routes,
            bytearray().join(r.payload for r in masks), bytes(teacher[-1].payload) if teacher else b"",
        )  # fmt: skip

    def load(self, sequence: AnySequence) -> AnySequence:
        """Return a copy of a sequence that holds its tokens, and of a sample those of all its sequences.

        Routes that an engine wrote stay on disk; `load_with_routes` reads them too. Raises RunError like
        `arrays`.
        """
        changes: dict[str, Any] = {}
        if isinstance(sequence, Sample):
            changes["extra_sequences"] = [self.load(q) for q in sequence.extra_sequences]
        if isinstance(arrays := self.arrays(sequence), TokenSequence):
            return replace(sequence, **changes) if any(changes.values()) else sequence
        ids, mu, behaviour, routes, support, teacher_logprobs = arrays
        out = replace(
            sequence, response_ids=token_ids(), mu=log_probs(), behaviour=behaviour.tolist(), routes=routes,
            support=support, teacher_logprobs=teacher_logprobs, pieces=[], **changes,
        )  # fmt: skip
        out.response_ids.frombytes(ids.astype(np.intc).tobytes())
        out.mu.frombytes(mu.astype(np.double).tobytes())
        return out


def _concatenate(parts: Sequence[NDArray[T]], kind: type[T]) -> NDArray[T]:
    return np.concatenate(parts) if parts else np.empty(0, kind)
