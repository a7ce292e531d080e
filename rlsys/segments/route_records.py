"""Records of routes: which experts tokens took, layer by layer, as an engine writes them and a rank reads them.

    segments/EPOCH-UNIT-START/RANK-NUMBER.seg    records as in rlsys/segments/records.py, of the kind ROUTES

        `start` is the first position in prompt + response, `tokens` the number of positions
        payload: table  layers  topk  width   one checksum a layer     then  experts of layer 0, of layer 1, ...
                        u16     u16   u32     u32[layers]                    uint8 or uint16 [tokens, topk] each

A pipeline stage reads its own layers and nothing else. So the record's checksum covers head and table, and each layer
has one of its own. The folder belongs to one start of one engine, a file in it to one process of that engine, which
is its only writer (rlsys/engine/hooks/route_writer.py). The engine's answer carries a pointer instead of the
experts; what the rollout process has committed of pointers is what exists.
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
from rlsys.core.types import Sample
from rlsys.segments.records import HEADER_BYTES, LARGEST, Kind, SegmentReader, Whose, decode_head, head

ROUTES_VARIABLE = "RLSYS_ROUTES"
"""Tells an engine's process its folder but for EPOCH and START: RUN/segments/UNIT."""
ASK = "rlsys_routes"
"""A key of a request's custom_params, which stock SGLang ignores: answer with a pointer if you can."""
_FILE = re.compile(r"(\d{6})-([\w-]{1,100})-(\d{1,9})/(\d{1,9})-(\d{6})\.seg", re.ASCII)
"""Bounded: a longer name is an error of the disk in the process that looks for the file."""
_POINTER = b"rlsyspt1"
"""What a pointer begins with. The stock answer begins with an expert's id as int32, and none is so large."""
_TABLE = struct.Struct("<HHI")

Read = Callable[[str, int, int], bytes]
"""(segment, offset, length) -> bytes of that file."""


@dataclass(frozen=True, order=True)
class RouteFile:
    """The parts of a file's name."""

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
        """None: no such name, and no path to anywhere else."""
        found = _FILE.fullmatch(name)
        if found is None:
            return None
        epoch, unit, start, rank, number = found.groups()
        return cls(int(epoch), unit, int(start), int(rank), int(number))


@dataclass(frozen=True)
class LayerRoutes:
    """Like RouteSpan, of some layers only: experts `[layers, end - start, topk]`."""

    start: int
    end: int
    layers: tuple[int, ...]
    experts: NDArray[np.unsignedinteger]


def encode(experts: NDArray[np.integer], start: int) -> bytes:
    """A record of experts `[tokens, layers, topk]`, of positions from `start` on.

    Raises ValueError for more than a record holds, 4 GiB: 9 million tokens of DeepSeek-V3.
    """
    tokens, layers, topk = experts.shape
    width = 1 if experts.size == 0 or np.max(experts) < 256 else 2
    by_layer = np.ascontiguousarray(experts.astype(f"<u{width}").transpose(1, 0, 2))
    data = by_layer.tobytes()
    size = tokens * topk * width
    sums = [zlib.crc32(memoryview(data)[i * size : (i + 1) * size]) for i in range(layers)]
    table = _TABLE.pack(layers, topk, width) + struct.pack(f"<{layers}I", *sums)
    if len(table) + len(data) > LARGEST:
        raise ValueError(f"routes of {tokens} positions have {len(data)} bytes, a record at most {LARGEST}")
    return (
        head(Kind.ROUTES, Whose(0), start, tokens, len(table) + len(data), table, len(table)) + table + data
    )


def pointer(segment: str, offset: int, record: bytes) -> bytes:
    """What an answer carries for a record that lies there."""
    found = decode_head(record, "")
    return _POINTER + msgspec.msgpack.encode(
        [segment, offset, len(record), found.checksum, found.start, found.tokens]
    )


def read_pointer(data: bytes, first: int, rows: int) -> RouteLocation | None:
    """Of `rows` positions from `first` on; None for bytes that are no pointer.

    Raises ValueError for one that points at anything else.
    """
    if not data.startswith(_POINTER):
        return None
    segment, *place, start, tokens = msgspec.msgpack.decode(
        data[len(_POINTER) :], type=tuple[str, int, int, int, int, int]
    )
    if RouteFile.of(segment) is None or min(place) < 0:
        raise ValueError(f"routes in {segment[:100]!r} at {place}")
    if (start, tokens) != (first, rows):
        raise ValueError(f"routes of {tokens} positions from {start} on, expected {rows} from {first} on")
    return RouteLocation(segment, *place)


def read_routes(read: Read, span: RouteSpan, layers: Sequence[int] | None) -> LayerRoutes:
    """Of the span's record, these layers; None: all. Reads neighbouring layers together and no others.

    Raises RunError for bytes that are not those that the engine wrote.
    """
    place = span.location
    assert place is not None
    where = f"{place.segment} at {place.offset}"
    found = decode_head(read(place.segment, place.offset, HEADER_BYTES), where)
    if (found.kind, found.checksum) != (Kind.ROUTES, place.checksum):
        raise RunError(f"{where}: damaged: not the routes that the ledger points at")
    table = read(place.segment, place.offset + HEADER_BYTES, found.routes)
    found.check(table, where)
    count, topk, width = _TABLE.unpack_from(table)
    sums = struct.unpack_from(f"<{count}I", table, _TABLE.size)
    wanted = tuple(range(count)) if layers is None else tuple(layers)
    if strange := [layer for layer in wanted if not layer < count]:
        raise RunError(f"{where}: routes of {count} layers, but layer {strange[0]} was asked for")
    size, base = found.tokens * topk * width, place.offset + HEADER_BYTES + found.routes
    parts: list[bytes] = []
    for _, run in groupby(enumerate(wanted), lambda at: at[1] - at[0]):
        near = [layer for _, layer in run]
        data = read(place.segment, base + near[0] * size, len(near) * size)
        for i, layer in enumerate(near):
            if zlib.crc32(memoryview(data)[i * size : (i + 1) * size]) != sums[layer]:
                raise RunError(f"{where}: damaged: layer {layer} has another checksum")
        parts.append(data)
    joined = parts[0] if len(parts) == 1 else b"".join(parts)
    experts = np.frombuffer(joined, f"<u{width}").reshape(len(wanted), found.tokens, topk)
    skip = span.start - found.start  # the weights changed: what the older ones chose is gone
    return LayerRoutes(span.start, span.end, wanted, experts[:, skip : skip + span.end - span.start])


def whole(routes: LayerRoutes) -> RouteSpan:
    """With all layers, in the form of a span in hand."""
    experts = routes.experts.transpose(1, 0, 2)
    kind = "u1" if np.max(experts, initial=0) < 256 else "<u2"
    return RouteSpan(routes.start, routes.end, experts.astype(kind).tobytes())


def in_hand(reader: SegmentReader, sample: Sample) -> Sample:
    """The sample with tokens and routes, so that it needs no file any more. Raises RunError as `read_routes`."""
    loaded = reader.loaded(sample)
    routes = [
        s if s.location is None else whole(read_routes(reader.bytes_at, s, None)) for s in loaded.routes
    ]
    return replace(
        loaded, routes=routes, extra_sequences=[in_hand(reader, q) for q in loaded.extra_sequences]
    )


def written_bytes(path: Path) -> int:
    """Of a file beside its writer; -1 when it is not there. Opened, because a network file system looks anew only
    then."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
