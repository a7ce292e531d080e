"""SGLang's two hashes of a tensor, fed part by part: 64 bits in hexadecimal. Nothing of a part is kept.

A CPU engine hashes bytes with SHA-256. A CUDA engine runs a kernel of its own (0.5.23,
`sglang/kernels/ops/memory/gpu_tensor_hash.py`): each 32-bit word is mixed with its place (MurmurHash3's 32-bit
finalizer, twice with different seeds), words are added up by tiles of 8,192, tiles are finished and added up. That
kernel wants the whole tensor in one piece. A sum over tiles does not: `TileHash` computes the same number in plain
torch, on any device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MASK_64 = 2**64 - 1
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
_PLACES = (
    (0x27D4EB2D, 15),
    (0x165667B1, 13),
)  # factor and rotation of a word's place, of each half of the hash
TILE = 8192
"""Words."""
_AT_ONCE = 512 * TILE
"""Words of one round: bounds the temporaries, eight bytes a word each."""


class TensorHash(Protocol):
    def update(self, part: Tensor) -> None: ...

    def digest(self) -> str: ...


def hash_like_an_engine(part: Tensor) -> TensorHash:
    """The one that an engine uses on the kind of device that `part` is on."""
    return TileHash() if part.is_cuda else ByteHash()


def compile_hash(device: torch.device) -> None:
    """Have what hashes on this kind of device compiled, which takes seconds once. Before the first push."""
    words = torch.zeros(TILE + 1, dtype=torch.int32, device=device)
    hasher = hash_like_an_engine(words)
    hasher.update(words)
    hasher.digest()


class ByteHash:
    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, part: Tensor) -> None:
        self._sha.update(_bytes(part).numpy().data)

    def digest(self) -> str:
        return self._sha.hexdigest()[:16]


@dataclass(frozen=True)
class TilePart:
    """What some of a tensor's words come to: the sum of the tiles that they fill, finished, and the sums of those
    that they share with others. `total`: words of the tensor, by which tiles are finished."""

    words: int
    total: int
    filled: int
    shared: dict[int, tuple[int, int]]
    """Tile -> the two halves of the hash."""


def join(parts: Sequence[TilePart]) -> str | None:
    """The hash of the tensor that these are the parts of; None while some are missing."""
    total = parts[0].total if parts else 0
    if sum(part.words for part in parts) != total:
        return None
    found = sum(part.filled for part in parts)
    for tile in {tile for part in parts for tile in part.shared}:
        halves = [part.shared.get(tile, (0, 0)) for part in parts]
        high, low = (torch.tensor(sum(half) & _MASK) for half in zip(*halves, strict=True))
        found += _finished(high, low, total)
    return f"{_finish_64(found & _MASK_64):016x}" if total else f"{0:016x}"


class TileHash:
    """Keeps less than a tile of bytes that do not fill one yet, and 16 bytes for each tile of 32 KiB. `start`: words
    of the tensor before the first part, where another rank has those."""

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._count = start  # words up to the last that is in `_sums`
        self._tail: Tensor | None = None  # bytes
        self._sums: list[Tensor] = []  # of [2, tiles] int64, each below 2^32: the two halves

    def update(self, part: Tensor) -> None:
        data, tile = _bytes(part), 4 * TILE
        begun = 4 * self._count % tile  # only before the first tile's end: another rank has what is before
        if self._tail is not None or begun:
            tail = data[:0] if self._tail is None else self._tail
            need = min(tile - begun - len(tail), len(data))
            head, data = torch.cat([tail, data[:need]]), data[need:]
            self._tail = None
            if begun + len(head) < tile:
                self._tail = head
                return
            self._add(_words(head))
        whole = len(data) - len(data) % tile
        for start in range(0, whole, 4 * _AT_ONCE):
            self._add(_words(data[start : min(start + 4 * _AT_ONCE, whole)]))
        if whole < len(data):
            self._tail = data[whole:].clone()  # not a view: it would keep all of the part

    def digest(self) -> str:
        """Of a tensor that came whole. Empties it. A tensor without elements is 0."""
        return join([self.part(None)]) or ""

    def part(self, total: int | None) -> TilePart:
        """What came, of a tensor of `total` words; None: it came whole. Empties it."""
        if self._tail is not None and len(self._tail):
            self._add(_words(torch.nn.functional.pad(self._tail, (0, -len(self._tail) % 4))))
        total = self._count if total is None else total
        shared: dict[int, tuple[int, int]] = {}
        filled = 0
        if self._sums:
            high, low = torch.cat(self._sums, 1)
            first, last = self._start // TILE, self._start // TILE + len(high) - 1
            edges = [first] if self._start % TILE else []
            edges += [last] if self._count % TILE and self._count != total and last not in edges else []
            for tile in edges:
                shared[tile] = int(high[tile - first]), int(low[tile - first])
            inner = slice(int(first in edges), len(high) - int(last in edges and last != first))
            filled = _finished(high[inner], low[inner], total)
        words = self._count - self._start
        self._sums, self._tail = [], None
        return TilePart(words, total, filled, shared)

    def _add(self, words: Tensor) -> None:
        """`[n]` int64 below 2^32; they end with a tile, save for the last call."""
        place = torch.arange(self._count, self._count + len(words), device=words.device) & _MASK
        halves = []
        for seed, (factor, turn) in zip(_SEEDS, _PLACES, strict=True):
            rotated = ((place << turn) & _MASK) | (place >> (32 - turn))
            mixed = _finish(words ^ (((place * factor + seed) & _MASK) ^ rotated))
            before = self._count % TILE
            edges = before, -(before + len(mixed)) % TILE
            halves.append(torch.nn.functional.pad(mixed, edges).view(-1, TILE).sum(1) & _MASK)
        self._sums.append(torch.stack(halves))
        self._count += len(words)


def _bytes(part: Tensor) -> Tensor:
    return part.detach().contiguous().view(-1).view(torch.uint8)


def _words(data: Tensor) -> Tensor:
    """Bytes, four to a word, as int64."""
    if data.storage_offset() % 4:
        data = data.clone()  # a view as int32 must begin where one may stand
    return data.view(torch.int32).long() & _MASK


def _finish(x: Tensor) -> Tensor:
    """MurmurHash3's fmix32 of int64 values below 2^32. Products wrap at 64 bits, which leaves the low 32 right."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _finished(high: Tensor, low: Tensor, total: int) -> int:
    """The sum of tiles whose halves these are."""
    size = (4 * total) & _MASK
    each = (_finish(high ^ size) << 32) | _finish(low ^ size)
    return int(each.sum()) & _MASK_64  # int64 wraps, as uint64 does


def _finish_64(x: int) -> int:
    """SplitMix64's finalizer."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK_64
    return x ^ (x >> 31)
