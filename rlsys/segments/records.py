"""Record format of segments, append-only files with the tokens of samples, and the reader of segments.

    RUN/segments/EPOCH-WRITER-NUMBER.seg    a sequence of records, little-endian:

        magic  checksum  kind  version  policy  sample  sequence  parent  start  tokens  routes  payload
        4 s    u32       u8    u8       u16     u64     u32       u32     u32    u32     u32     u32

    The payload depends on the kind:
        TOKENS            ids int32[tokens], mu float64[tokens], routes (msgpack of RouteSpans, `routes` bytes)
        SCORES            the trainer's log-probs float32[tokens]
        SUPPORT           for each token, the ids that sampling did not mask (rlsys/segments/support.py)
        TEACHER_LOGPROBS  a teacher's top-k log-probs at each token (rlsys/segments/teacher_logprobs.py)
        ROUTES            experts, in separate files that engines write (rlsys/segments/route_records.py)

`start` is the position of the first token in its sequence. `sequence` is the number of the sequence in its sample,
and `parent` the number of the sequence that it continues. `policy` is reserved for several policies, and is 0.

The rollout process and its workers write the records (rlsys/ledger/segments.py). Processes with access to the run
folder read them in place; a trainer rank reads the records of the samples that it trains.
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
"""Offset of the first byte of the header that the checksum covers."""
_MAGIC = b"rlsg"
_VERSION = 1
_NO_PARENT = 2**32 - 1
MAX_PAYLOAD_BYTES = 2**32 - 1
"""Maximum size of a payload, whose length is stored in 32 bits."""

T = TypeVar("T", bound=np.generic)


class Kind(IntEnum):
    TOKENS = 1
    SCORES = 2
    SUPPORT = 3
    ROUTES = 4
    TEACHER_LOGPROBS = 5


class Record(NamedTuple):
    """A decoded record.

    Attributes:
        kind: kind of the payload.
        sample_id: id of the sample.
        sequence: number of the sequence in the sample.
        start: position of the first token in the sequence.
        tokens: number of tokens.
        routes: size of the routes at the end of the payload in bytes.
        payload: the payload.
    """

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
    """Identity of a sequence in the header of a record."""

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
        payload: payload of this kind (see the module's docstring).
        routes: size of the routes at the end of the payload in bytes.
    """
    return encode_header(kind, key, start, tokens, len(payload), payload, routes) + payload


def encode_header(
    kind: Kind, key: SequenceKey, start: int, tokens: int, length: int, checksummed: bytes, routes: int = 0
) -> bytes:
    """Encode the header of a record; other arguments are those of `encode`.

    Args:
        length: size of the payload in bytes.
        checksummed: part of the payload that the checksum covers in addition to the header.
    """
    header = _HEADER.pack(_MAGIC, 0, kind, _VERSION, 0, *key, start, tokens, routes, length)[_CHECKSUM_START:]
    checksum = zlib.crc32(checksummed, zlib.crc32(header))
    return _MAGIC + checksum.to_bytes(4, "little") + header


def decode(data: bytes, location: str) -> Record:
    """Decode and verify one record.

    Args:
        location: file and offset, for messages.

    Raises:
        RunError: the record is damaged, or has another version.
    """
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise RunError(f"{location}: damaged: no record starts here")
    _, checksum, kind, version, _, sample, sequence, _, start, tokens, routes, payload = _HEADER.unpack_from(
        data
    )
    if len(data) != _HEADER.size + payload or zlib.crc32(memoryview(data)[_CHECKSUM_START:]) != checksum:
        raise RunError(f"{location}: damaged: checksum mismatch in the record of sample {sample}")
    if version != _VERSION:
        raise RunError(f"{location}: record version {version}; expected {_VERSION}")
    return Record(Kind(kind), sample, sequence, start, tokens, routes, memoryview(data)[_HEADER.size :])


class RecordHeader(NamedTuple):
    """Header of a record whose payload is read in parts.

    Attributes:
        checksum: checksum of `header` and of the first `routes` bytes of the payload.
        header: the bytes of the header after the checksum.
    """

    kind: Kind
    checksum: int
    start: int
    tokens: int
    routes: int
    header: bytes

    def check(self, checksummed: bytes, location: str) -> None:
        """Verify the checksum.

        Args:
            checksummed: the first `routes` bytes of the payload.
            location: file and offset, for messages.

        Raises:
            RunError: the header or these bytes are damaged.
        """
        checksum = zlib.crc32(checksummed, zlib.crc32(self.header))
        if len(checksummed) != self.routes or checksum != self.checksum:
            raise RunError(f"{location}: damaged: checksum mismatch in the header of the record")


def decode_header(data: bytes, location: str) -> RecordHeader:
    """Decode a header without verifying its checksum.

    Raises:
        RunError: the bytes are not a header, or its version or kind is unknown.
    """
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        raise RunError(f"{location}: damaged: no record starts here")
    _, checksum, kind, version, _, _, _, _, start, tokens, routes, _ = _HEADER.unpack_from(data)
    if version != _VERSION or kind not in tuple(Kind):
        raise RunError(
            f"{location}: record version {version} of kind {kind}; expected version {_VERSION} and a kind up to "
            f"{max(Kind)}"
        )
    return RecordHeader(Kind(kind), checksum, start, tokens, routes, data[_CHECKSUM_START:HEADER_BYTES])


class TokenArrays(NamedTuple):
    """The arrays in the pieces of a sequence. The names are those of the fields of TokenSequence.

    Attributes:
        response_ids: token ids, [tokens].
        mu: the engine's log-probs, [tokens].
        behaviour: the trainer's log-probs of the first tokens, [at most tokens]; NaN: not computed.
        routes: experts by position.
        support: sampling mask of each token; empty: none.
        teacher_logprobs: a teacher engine's top-k log-probs at each token; empty: none.
    """

    response_ids: NDArray[np.int32]
    mu: NDArray[np.float64]
    behaviour: NDArray[np.float32]
    routes: list[RouteSpan]
    support: bytearray
    teacher_logprobs: bytes


class SegmentReader:
    """Reads records in place, also while their writer appends further ones.

    Files stay open until `close` or the end of the `with` block. A closed reader can be used again.
    """

    def __init__(self, folder: Path, reader: str = "") -> None:
        """Create a reader without open files.

        Args:
            folder: the run folder.
            reader: name of the reading process, for messages.
        """
        self._folder = folder / FOLDER
        self._reader = reader and f"{reader}: "
        self._open: dict[str, int] = {}
        """Name of an open file -> its descriptor."""
        self.bytes_read = 0
        """Number of bytes that were read."""

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
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
            while len(data) < length:  # one call reads at most 2 GiB
                chunk = os.pread(self._open[segment], length - len(data), offset + len(data))
                if not chunk:
                    break
                data += chunk
        except FileNotFoundError:
            raise RunError(
                f"{self._reader}{path}: no such file; expected a run.dir that all machines of the trainer can access"
            ) from None
        except OSError as e:
            raise RunError(f"{self._reader}{path}: {e.strerror}") from None
        self.bytes_read += len(data)
        return data

    def arrays(self, sample: TokenSequence) -> TokenArrays | TokenSequence:
        """Return the arrays in the pieces of a sequence, or the sequence if it holds its tokens.

        Raises:
            RunError: a file is missing or damaged, or its records do not fit the sequence.
        """
        if len(sample.response_ids) == sample.tokens:
            return sample
        records = self._records(sample)
        kinds = Kind.TOKENS, Kind.SCORES, Kind.SUPPORT, Kind.TEACHER_LOGPROBS
        tokens, scores, masks, teacher = ([r for r in records if r.kind is kind] for kind in kinds)
        behaviour = np.full(max((r.start + r.tokens for r in scores), default=0), np.nan, np.float32)
        for record in scores:
            behaviour[record.start : record.start + record.tokens] = record.logp()
        routes = [
            span for r in tokens for span in msgspec.msgpack.decode(r.route_bytes(), type=list[RouteSpan])
        ]
        routes.sort(key=lambda span: span.start)  # locations of engines' routes may be in a later record
        return TokenArrays(
            _concatenate([r.ids() for r in tokens], np.int32), _concatenate([r.mu() for r in tokens], np.float64),
            behaviour, routes,
            bytearray().join(r.payload for r in masks), bytes(teacher[-1].payload) if teacher else b"",
        )  # fmt: skip

    def _records(self, sample: TokenSequence) -> list[Record]:
        """Read the records of a sequence, and check that they belong to it and have all of its tokens.

        Raises:
            RunError: a file is missing or damaged, or a check fails.
        """
        records = [self.read(piece) for piece in sample.pieces]
        for r in records:
            if (r.sample_id, r.sequence) != (sample.sample_id, sample.sequence):
                raise RunError(
                    f"sample {sample.sample_id}, sequence {sample.sequence}: the ledger references a record of "
                    f"sample {r.sample_id}, sequence {r.sequence}"
                )
        stored_tokens = sum(r.tokens for r in records if r.kind is Kind.TOKENS)
        if stored_tokens != sample.tokens:
            raise RunError(
                f"sample {sample.sample_id}: {sample.tokens} tokens in the ledger, but {stored_tokens} in its "
                "segments"
            )
        for r in records:
            if r.kind is Kind.TEACHER_LOGPROBS and (r.start, r.tokens) != (0, sample.tokens):
                raise RunError(
                    f"sample {sample.sample_id}: teacher log-probs of {r.tokens} tokens; expected {sample.tokens}"
                )
        return records

    def load(self, sequence: AnySequence) -> AnySequence:
        """Return a copy of a sequence with its tokens, and of a sample with the tokens of all its sequences.

        Routes in a file of an engine stay there; `load_with_routes` also reads them.

        Raises:
            RunError: a file is missing or damaged, or its records do not fit the sequence.
        """
        changes: dict[str, Any] = {}
        if isinstance(sequence, Sample):
            changes["extra_sequences"] = [self.load(q) for q in sequence.extra_sequences]
        if isinstance(arrays := self.arrays(sequence), TokenSequence):
            return replace(sequence, **changes) if any(changes.values()) else sequence
        ids, mu, behaviour, routes, support, teacher_logprobs = arrays
        loaded = replace(
            sequence, response_ids=token_ids(), mu=log_probs(), behaviour=behaviour.tolist(), routes=routes,
            support=support, teacher_logprobs=teacher_logprobs, pieces=[], **changes,
        )  # fmt: skip
        loaded.response_ids.frombytes(ids.astype(np.intc).tobytes())
        loaded.mu.frombytes(mu.astype(np.double).tobytes())
        return loaded


def _concatenate(parts: Sequence[NDArray[T]], kind: type[T]) -> NDArray[T]:
    return np.concatenate(parts) if parts else np.empty(0, kind)
