"""Record format of routed experts, by layer. Engines write the records, and trainer ranks read them.

    RUN/segments/EPOCH-UNIT-START/RANK-NUMBER.seg    records of the kind ROUTES (rlsys/segments/records.py)

        `start` is the first position in prompt + response, `tokens` the number of positions
        payload: table  layers  topk  width   one checksum a layer     then  experts of layer 0, of layer 1, ...
                        u16     u16   u32     u32[layers]                    uint8 or uint16 [tokens, topk] each

The record's checksum covers header and table, and each layer has a separate checksum, because a pipeline stage reads
only its layers. A folder belongs to one start of one engine, and a file to one process of the engine, its only writer
(rlsys/engine/hooks/route_writer.py). The engine's response contains a pointer to the record instead of the experts.
The record is valid when the rollout process has committed the pointer.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlsys.core.errors import RunError
from rlsys.core.spans import RouteLocation, RouteSpan
from rlsys.core.types import AnySequence, Sample
from rlsys.segments.records import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Kind,
    SegmentReader,
    SequenceKey,
    decode_header,
    encode_header,
)

ROUTES_VARIABLE = "RLSYS_ROUTES"
"""Environment variable of an engine: RUN/segments/UNIT, from which the writer makes the name of its folder."""
ROUTES_PARAM = "rlsys_routes"
"""Key in custom_params of a request: return a pointer instead of the experts if possible. Stock SGLang ignores it."""
_FILE = re.compile(r"(\d{6})-([\w-]{1,100})-(\d{1,9})/(\d{1,9})-(\d{6})\.seg", re.ASCII)
"""Form of a file name. The length is limited, because reading a longer name would raise an OSError."""
_POINTER = b"rlsyspt1"
"""Prefix of a pointer. A response of stock SGLang starts with an expert's id as int32, which is always smaller."""
_TABLE = struct.Struct("<HHI")

Read = Callable[[str, int, int], bytes]
"""Function from (segment, offset, length) to the bytes in the file."""


@dataclass(frozen=True, order=True)
class RouteFile:
    """The parts of the name of a file with routed experts.

    Attributes:
        epoch: number of the launch.
        unit: name of the engine.
        start: number of starts of the engine in the launch.
        rank: number of the process in the engine.
        number: number of the file among the files of this process.
    """

    epoch: int
    unit: str
    start: int
    rank: int
    number: int

    @property
    def folder(self) -> str:
        return f"{self.epoch:06d}-{self.unit}-{self.start}"

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.rank}-{self.number:06d}.seg"

    @classmethod
    def of(cls, name: str) -> RouteFile | None:
        """Parse a file name relative to segments/; return None if it has another form."""
        match = _FILE.fullmatch(name)
        if match is None:
            return None
        epoch, unit, start, rank, number = match.groups()
        return cls(int(epoch), unit, int(start), int(rank), int(number))


@dataclass(frozen=True)
class LayerRoutes:
    """The routes of a span in some layers.

    Attributes:
        start: first position of the span.
        end: position after the span.
        layers: indices of the layers.
        experts: ids of the experts, `[layers, end - start, topk]`.
    """

    start: int
    end: int
    layers: tuple[int, ...]
    experts: NDArray[np.unsignedinteger]


def encode(experts: NDArray[np.integer], start: int) -> bytes:
    """Encode a record of routed experts.

    Args:
        experts: `[tokens, layers, topk]`.
        start: position of the first token in prompt + response.

    Raises:
        ValueError: the payload is larger than 4 GiB (9 million tokens of DeepSeek-V3).
    """
    tokens, layers, topk = experts.shape
    width = 1 if experts.size == 0 or np.max(experts) < 256 else 2
    by_layer = np.ascontiguousarray(experts.astype(f"<u{width}").transpose(1, 0, 2))
    data = by_layer.tobytes()
    size = tokens * topk * width
    sums = [zlib.crc32(memoryview(data)[i * size : (i + 1) * size]) for i in range(layers)]
    table = _TABLE.pack(layers, topk, width) + struct.pack(f"<{layers}I", *sums)
    if len(table) + len(data) > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"routes of {tokens} positions have {len(table) + len(data)} bytes; expected at most {MAX_PAYLOAD_BYTES}"
        )
    return (
        encode_header(Kind.ROUTES, SequenceKey(0), start, tokens, len(table) + len(data), table, len(table))
        + table
        + data
    )


def pointer(segment: str, offset: int, record: bytes) -> bytes:
    """Encode the pointer to a record, which a response contains.

    Args:
        segment: name of the file, relative to segments/.
        offset: offset of the record in the file.
        record: the record.
    """
    header = decode_header(record, "")
    return _POINTER + msgspec.msgpack.encode(
        [segment, offset, len(record), header.checksum, header.start, header.tokens]
    )


def read_pointer(data: bytes, first: int, rows: int) -> RouteLocation | None:
    """Decode a pointer; return None if `data` is not a pointer.

    Args:
        first: expected first position of the record.
        rows: expected number of positions.

    Raises:
        ValueError: the pointer is malformed, or the record has other positions.
    """
    if not data.startswith(_POINTER):
        return None
    segment, *location, start, tokens = msgspec.msgpack.decode(
        data[len(_POINTER) :], type=tuple[str, int, int, int, int, int]
    )
    if RouteFile.of(segment) is None or min(location) < 0:
        raise ValueError(
            f"a pointer names the file {segment[:100]!r} with offset, length and checksum {location}; expected a "
            "file of routed experts, and numbers of 0 or more"
        )
    if (start, tokens) != (first, rows):
        raise ValueError(f"routes of {tokens} positions from {start} on; expected {rows} from {first} on")
    return RouteLocation(segment, *location)


def read_routes(read: Read, span: RouteSpan, layers: Sequence[int] | None) -> LayerRoutes:
    """Read the routes of a span from its record on disk.

    Args:
        read: reads bytes of a file.
        span: a span with a location.
        layers: indices of the layers to read; None: all. Adjacent layers are read at once.

    Raises:
        RunError: the record is missing or damaged, or does not have a layer.
    """
    location = span.location
    assert location is not None
    description = f"{location.segment} at {location.offset}"
    header = decode_header(read(location.segment, location.offset, HEADER_BYTES), description)
    if (header.kind, header.checksum) != (Kind.ROUTES, location.checksum):
        raise RunError(f"{description}: damaged: expected the record of routes that the ledger references")
    table = read(location.segment, location.offset + HEADER_BYTES, header.routes)
    header.check(table, description)
    count, topk, width = _TABLE.unpack_from(table)
    sums = struct.unpack_from(f"<{count}I", table, _TABLE.size)
    selected = tuple(range(count)) if layers is None else tuple(layers)
    if missing := [layer for layer in selected if not layer < count]:
        raise RunError(
            f"{description}: layer {missing[0]} was requested; expected a layer below {count}, the number of layers "
            "in the record"
        )
    size = header.tokens * topk * width  # of one layer
    base = location.offset + HEADER_BYTES + header.routes
    parts: list[bytes] = []
    for _, numbered_layers in groupby(enumerate(selected), lambda item: item[1] - item[0]):
        adjacent = [layer for _, layer in numbered_layers]
        data = read(location.segment, base + adjacent[0] * size, len(adjacent) * size)
        for i, layer in enumerate(adjacent):
            if zlib.crc32(memoryview(data)[i * size : (i + 1) * size]) != sums[layer]:
                raise RunError(f"{description}: damaged: checksum mismatch in layer {layer}")
        parts.append(data)
    payload = parts[0] if len(parts) == 1 else b"".join(parts)
    experts = np.frombuffer(payload, f"<u{width}").reshape(len(selected), header.tokens, topk)
    first = span.start - header.start  # the span may lack the first positions of the record
    return LayerRoutes(span.start, span.end, selected, experts[:, first : first + span.end - span.start])


def to_route_span(routes: LayerRoutes) -> RouteSpan:
    """Convert routes of all layers to a RouteSpan with the experts in memory."""
    experts = routes.experts.transpose(1, 0, 2)
    kind = "u1" if np.max(experts, initial=0) < 256 else "<u2"
    return RouteSpan(routes.start, routes.end, experts.astype(kind).tobytes())


def load_with_routes(reader: SegmentReader, sequence: AnySequence) -> AnySequence:
    """Return a copy of a sequence with its tokens and routes, and of a sample with those of all its sequences.

    Raises:
        RunError: a file is missing or damaged, or its records do not fit the sequence.
    """
    loaded = reader.load(sequence)
    routes = [
        s if s.location is None else to_route_span(read_routes(reader.bytes_at, s, None))
        for s in loaded.routes
    ]
    loaded = replace(loaded, routes=routes)
    if isinstance(loaded, Sample):
        loaded.extra_sequences = [load_with_routes(reader, q) for q in loaded.extra_sequences]
    return loaded


def file_size(path: Path) -> int:
    """Return the current size in bytes of a file that another process may extend; -1 if it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # makes a network file system refresh the attributes
    except FileNotFoundError:
        return -1
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
