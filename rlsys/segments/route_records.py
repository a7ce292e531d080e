"""Record format of routed experts, the experts that each token used, by layer: engines write, trainer ranks read.

    segments/EPOCH-UNIT-START/RANK-NUMBER.seg    records of kind ROUTES as in rlsys/segments/records.py

        `start` is the first position in prompt + response, `tokens` the number of positions
        payload: table  layers  topk  width   one checksum a layer     then  experts of layer 0, of layer 1, ...
                        u16     u16   u32     u32[layers]                    uint8 or uint16 [tokens, topk] each

A pipeline stage reads only its own layers. The record's checksum therefore covers header and table, and each
layer has a checksum of its own. A folder belongs to one start of one engine, a file in it to one process of
that engine, its only writer (rlsys/engine/hooks/route_writer.py). The engine's response carries a pointer
instead of the experts. A record exists once the rollout process has committed a pointer to it.
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
"""Environment variable of an engine: its folder RUN/segments/UNIT, to which the writer adds EPOCH and START."""
ROUTES_PARAM = "rlsys_routes"
"""Key in a request's custom_params, ignored by stock SGLang: return a pointer to the routed experts if possible."""
_FILE = re.compile(r"(\d{6})-([\w-]{1,100})-(\d{1,9})/(\d{1,9})-(\d{6})\.seg", re.ASCII)
"""Form of a file name. Its length is limited, because a longer name would be an OS error for the reader."""
_POINTER = b"rlsyspt1"
"""Prefix of a pointer. A stock response starts with an expert's id as int32, which is never that large."""
_TABLE = struct.Struct("<HHI")

Read = Callable[[str, int, int], bytes]
"""(segment, offset, length) -> bytes of that file."""


@dataclass(frozen=True, order=True)
class RouteFile:
    """The parts of the name of a file of routed experts."""

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
        """Parse a file name relative to segments/. None if it has another form, such as a path to another folder."""
        match = _FILE.fullmatch(name)
        if match is None:
            return None
        epoch, unit, start, rank, number = match.groups()
        return cls(int(epoch), unit, int(start), int(rank), int(number))


@dataclass(frozen=True)
class LayerRoutes:
    """A RouteSpan restricted to some layers; `experts` is `[layers, end - start, topk]`."""

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
        ValueError: more than 4 GiB, the largest record: 9 million tokens of DeepSeek-V3.
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
            f"routes of {tokens} positions have {len(data)} bytes, a record at most {MAX_PAYLOAD_BYTES}"
        )
    return (
        encode_header(Kind.ROUTES, SequenceKey(0), start, tokens, len(table) + len(data), table, len(table))
        + table
        + data
    )


def pointer(segment: str, offset: int, record: bytes) -> bytes:
    """Encode the pointer that a response carries to `record`, which starts at `offset` of `segment`."""
    header = decode_header(record, "")
    return _POINTER + msgspec.msgpack.encode(
        [segment, offset, len(record), header.checksum, header.start, header.tokens]
    )


def read_pointer(data: bytes, first: int, rows: int) -> RouteLocation | None:
    """Decode a pointer to `rows` positions from `first` on. None for bytes that are no pointer.

    Raises:
        ValueError: the pointer is malformed or points at other positions.
    """
    if not data.startswith(_POINTER):
        return None
    segment, *location, start, tokens = msgspec.msgpack.decode(
        data[len(_POINTER) :], type=tuple[str, int, int, int, int, int]
    )
    if RouteFile.of(segment) is None or min(location) < 0:
        raise ValueError(
            f"pointer to routes in {segment[:100]!r} at {location}: expected a file of routed experts"
        )
    if (start, tokens) != (first, rows):
        raise ValueError(f"routes of {tokens} positions from {start} on, expected {rows} from {first} on")
    return RouteLocation(segment, *location)


def read_routes(read: Read, span: RouteSpan, layers: Sequence[int] | None) -> LayerRoutes:
    """Read these layers of a span's record; None reads all. Adjacent layers are read at once, others are skipped.

    Raises:
        RunError: the bytes are not those that the engine wrote.
    """
    location = span.location
    assert location is not None
    description = f"{location.segment} at {location.offset}"
    header = decode_header(read(location.segment, location.offset, HEADER_BYTES), description)
    if (header.kind, header.checksum) != (Kind.ROUTES, location.checksum):
        raise RunError(f"{description}: damaged: not the routes that the ledger points at")
    table = read(location.segment, location.offset + HEADER_BYTES, header.routes)
    header.check(table, description)
    count, topk, width = _TABLE.unpack_from(table)
    sums = struct.unpack_from(f"<{count}I", table, _TABLE.size)
    selected = tuple(range(count)) if layers is None else tuple(layers)
    if missing := [layer for layer in selected if not layer < count]:
        raise RunError(f"{description}: routes of {count} layers, but layer {missing[0]} was requested")
    size, base = header.tokens * topk * width, location.offset + HEADER_BYTES + header.routes
    parts: list[bytes] = []
    for _, run in groupby(enumerate(selected), lambda item: item[1] - item[0]):
        run_layers = [layer for _, layer in run]
        data = read(location.segment, base + run_layers[0] * size, len(run_layers) * size)
        for i, layer in enumerate(run_layers):
            if zlib.crc32(memoryview(data)[i * size : (i + 1) * size]) != sums[layer]:
                raise RunError(f"{description}: damaged: checksum mismatch in layer {layer}")
        parts.append(data)
    payload = parts[0] if len(parts) == 1 else b"".join(parts)
    experts = np.frombuffer(payload, f"<u{width}").reshape(len(selected), header.tokens, topk)
    skip = span.start - header.start  # the start was sampled by older weights
    return LayerRoutes(span.start, span.end, selected, experts[:, skip : skip + span.end - span.start])


def to_route_span(routes: LayerRoutes) -> RouteSpan:
    """Convert routes of all layers to a RouteSpan that holds the experts itself."""
    experts = routes.experts.transpose(1, 0, 2)
    kind = "u1" if np.max(experts, initial=0) < 256 else "<u2"
    return RouteSpan(routes.start, routes.end, experts.astype(kind).tobytes())


def load_with_routes(reader: SegmentReader, sequence: AnySequence) -> AnySequence:
    """Return a copy of a sequence or sample that holds its tokens and routes. Raises RunError like `read_routes`."""
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
    """Return the current size of a file that may still grow, in bytes; -1 if it does not exist.

    The file is opened because a network file system refreshes its attributes only then.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
