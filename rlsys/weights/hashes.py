"""SGLang's two hashes of a tensor, from its parts: 64 bits in hexadecimal.

A CPU engine hashes bytes with SHA-256. A CUDA engine runs a kernel of its own (0.5.23,
`sglang/kernels/ops/memory/gpu_tensor_hash.py`): each 32-bit word is mixed with its place (MurmurHash3's 32-bit
finalizer, twice with different seeds), words are added up by tiles of 8,192, tiles are finished and added up. That
kernel wants the whole tensor in one piece. A sum over tiles does not: `PartDigests` has rlsys/ops/tensor_digest.py
compute it for the parts of many tensors at once. `TileHash` is the same number in plain torch, on any device.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rlsys.convert.hash_shares import PENDING_BYTES

if TYPE_CHECKING:
    from rlsys.ops import tensor_digest

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
Word = TypeVar("Word", int, Tensor)
_AT_ONCE = 512 * TILE
"""Words of one round: bounds the temporaries, eight bytes a word each."""


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


def merge(parts: Sequence[TilePart]) -> TilePart:
    """Parts of one tensor as one part."""
    shared: dict[int, tuple[int, int]] = {}
    for part in parts:
        for tile, (high, low) in part.shared.items():
            before = shared.get(tile, (0, 0))
            shared[tile] = (before[0] + high) & _MASK, (before[1] + low) & _MASK
    filled = sum(part.filled for part in parts) & _MASK_64
    return TilePart(sum(part.words for part in parts), parts[0].total, filled, shared)


def join(parts: Sequence[TilePart]) -> str | None:
    """The hash of the tensor that these are the parts of; None while some are missing."""
    total = parts[0].total if parts else 0
    if sum(part.words for part in parts) != total:
        return None
    if not total:
        return f"{0:016x}"
    whole, size = merge(parts), (4 * total) & _MASK
    tiles = sum((_finish(high ^ size) << 32) | _finish(low ^ size) for high, low in whole.shared.values())
    return f"{_finish_64((whole.filled + tiles) & _MASK_64):016x}"


class PartDigests:
    """Digests parts of GPU tensors, those of PENDING_BYTES in one launch of the kernel. The host waits once, in
    `results`.

    A part is held until it is digested; its memory must not change meanwhile. Where Triton has no such device (one
    that a test pretends), parts are digested one by one in plain torch.
    """

    def __init__(self) -> None:
        self._pending: list[tensor_digest.Part] = []
        self._bytes = 0
        self._digested: list[Tensor] = []
        self._of_kernel: list[tuple[int, int, int, int]] = []
        """Of each row that the kernel gives: the index of its part, words, start, total."""
        self._parts: list[list[TilePart]] = []

    def add(self, data: Tensor, start: int, total: int) -> int:
        """Digest `data`, from word `start` of a tensor of `total` words. Only the tensor's last part may end within
        a word.

        Returns:
            The part's index in `results`.
        """
        index = len(self._parts)
        self._parts.append([])
        kernels = _kernels(data.device)
        if kernels is None or not data.numel():
            state = TileHash(start)
            state.update(data)
            self._parts[index].append(state.part(total))
            return index
        for part in _laid_out(kernels, data.detach(), start, total):
            self._of_kernel.append((index, part.words, part.start, part.total))
            self._pending.append(part)
        self._bytes += data.nbytes
        if self._bytes >= PENDING_BYTES:
            self._launch(kernels)
        return index

    def results(self) -> list[TilePart]:
        """Of all parts, in the order of `add`."""
        if self._pending and (kernels := _kernels(self._pending[0].data.device)) is not None:
            self._launch(kernels)
        rows = torch.cat(self._digested).tolist() if self._digested else []
        for (index, words, start, total), (filled, *edges) in zip(self._of_kernel, rows, strict=True):
            end = start + words
            tiles = [start // TILE] if start % TILE else []
            last = [end // TILE] if end % TILE and end != total and end // TILE not in tiles else []
            halves = dict(zip(tiles, edges[:1], strict=False)) | dict(zip(last, edges[1:], strict=False))
            shared = {tile: ((value & _MASK_64) >> 32, value & _MASK) for tile, value in halves.items()}
            self._parts[index].append(TilePart(words, total, filled & _MASK_64, shared))
        self._digested, self._of_kernel = [], []
        self._parts = [[merge(parts)] for parts in self._parts]
        return [part for (part,) in self._parts]

    def _launch(self, kernels: ModuleType) -> None:
        self._digested.append(kernels.launch(self._pending, _SEEDS))
        self._pending, self._bytes = [], 0


def compile_hash(device: torch.device) -> None:
    """Compile the kernel that hashes on this kind of device, which takes seconds once. Before the first push."""
    if device.type == "cuda":
        digests = PartDigests()
        digests.add(torch.zeros(TILE + 1, dtype=torch.int32, device=device), 0, TILE + 1)
        digests.results()


def _kernels(device: torch.device) -> ModuleType | None:
    """rlsys/ops/tensor_digest.py where it runs on `device`."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return importlib.import_module("rlsys.ops.tensor_digest")  # Triton takes seconds to import


def _laid_out(kernels: ModuleType, data: Tensor, start: int, total: int) -> Iterator[tensor_digest.Part]:
    """The words of `data` where they are; a copy where they are not aligned. The bytes of a word that `data` does
    not fill are copied, followed by zeros."""
    rows, columns = data.shape if data.dim() == 2 else (1, 0)
    size = data.element_size()
    if (
        not data.is_contiguous()
        and data.dim() == 2
        and data.stride(1) == 1
        and not any(n % 4 for n in (columns * size, data.stride(0) * size, data.data_ptr()))
        and data.nbytes < 2**33
    ):
        row = columns * size // 4
        yield kernels.Part(data, rows * row, start, total, row, data.stride(0) * size // 4)
        return
    flat = _bytes(data)
    if flat.data_ptr() % 4:
        flat = flat.clone()
    words, rest = divmod(len(flat), 4)
    if words:
        yield kernels.Part(flat, words, start, total, words, words)
    if rest:
        tail = torch.nn.functional.pad(flat[4 * words :], (0, 4 - rest))
        yield kernels.Part(tail, 1, start + words, total, 1, 1)


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


def _finish(x: Word) -> Word:
    """MurmurHash3's fmix32 of values below 2^32. Products of int64 wrap, which leaves the low 32 bits right."""
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
