"""SGLang's two tensor hashes, computed from parts: 64 bits in hexadecimal.

A CPU engine hashes bytes with SHA-256. A CUDA engine runs a kernel of its own (0.5.23,
`sglang/kernels/ops/memory/gpu_tensor_hash.py`): it mixes each 32-bit word with its index (MurmurHash3's
32-bit finalizer, twice with different seeds), sums the words of tiles of 8,192, finalizes the tiles and sums them.
That kernel needs the whole tensor. A sum over tiles does not: `PartDigests` computes it with
rlsys/ops/tensor_digest.py for the parts of many tensors at once. `TileHash` computes the same number in plain
torch, on any device.
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
_INDEX_MIXERS = (
    (0x27D4EB2D, 15),
    (0x165667B1, 13),
)  # factor and rotation of a word's index, for each half of the hash
TILE = 8192
"""Words."""
HashValue = TypeVar("HashValue", int, Tensor)
_AT_ONCE = 512 * TILE
"""Words per round: limits the temporaries, each of eight bytes a word."""


class ByteHash:
    """SHA-256 of a tensor's bytes, truncated to 64 bits."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, part: Tensor) -> None:
        self._sha.update(_bytes(part).numpy().data)

    def digest(self) -> str:
        return self._sha.hexdigest()[:16]


@dataclass(frozen=True)
class TilePart:
    """Intermediate hash of some of a tensor's words.

    Attributes:
        word_count: number of words.
        total: words of the whole tensor, which finalizing a tile needs.
        complete: sum of the finalized tiles that these words fill.
        shared: sums of the tiles that they share with other parts.
    """

    word_count: int
    total: int
    complete: int
    shared: dict[int, tuple[int, int]]
    """Tile -> the two halves of the hash."""


def merge_parts(parts: Sequence[TilePart]) -> TilePart:
    """Merge parts of one tensor into one part."""
    shared: dict[int, tuple[int, int]] = {}
    for part in parts:
        for tile, (high, low) in part.shared.items():
            previous = shared.get(tile, (0, 0))
            shared[tile] = (previous[0] + high) & _MASK, (previous[1] + low) & _MASK
    complete = sum(part.complete for part in parts) & _MASK_64
    return TilePart(sum(part.word_count for part in parts), parts[0].total, complete, shared)


def final_hash(parts: Sequence[TilePart]) -> str | None:
    """Return the hash of the tensor that consists of these parts; None if some are missing."""
    total = parts[0].total if parts else 0
    if sum(part.word_count for part in parts) != total:
        return None
    if not total:
        return f"{0:016x}"
    merged, size = merge_parts(parts), (4 * total) & _MASK
    tiles = sum((_finish(high ^ size) << 32) | _finish(low ^ size) for high, low in merged.shared.values())
    return f"{_finish_64((merged.complete + tiles) & _MASK_64):016x}"


class PartDigests:
    """Digests parts of GPU tensors, in one kernel launch per PENDING_BYTES. The host waits once, in `results`.

    A part is referenced until it is digested; its memory must not change before. If Triton does not support the
    device (for example one that a test simulates), parts are digested one by one in plain torch.
    """

    def __init__(self) -> None:
        self._pending: list[tensor_digest.Part] = []
        self._bytes = 0
        self._digested: list[Tensor] = []
        self._of_kernel: list[tuple[int, int, int, int]] = []
        """Part index, words, start and total of each row of the kernel's results."""
        self._parts: list[list[TilePart]] = []

    def add(self, data: Tensor, start: int, total: int) -> int:
        """Digest `data`, which starts at word `start` of a tensor of `total` words.

        Only the tensor's last part may end within a word.

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
        for part in _word_parts(kernels, data.detach(), start, total):
            self._of_kernel.append((index, part.length, part.start, part.total))
            self._pending.append(part)
        self._bytes += data.nbytes
        if self._bytes >= PENDING_BYTES:
            self._launch(kernels)
        return index

    def results(self) -> list[TilePart]:
        """Return the digests of all parts, in the order of `add`."""
        if self._pending and (kernels := _kernels(self._pending[0].data.device)) is not None:
            self._launch(kernels)
        rows = torch.cat(self._digested).tolist() if self._digested else []
        for (index, word_count, start, total), (complete, *edges) in zip(self._of_kernel, rows, strict=True):
            end = start + word_count
            tiles = [start // TILE] if start % TILE else []
            last = [end // TILE] if end % TILE and end != total and end // TILE not in tiles else []
            halves = dict(zip(tiles, edges[:1], strict=False)) | dict(zip(last, edges[1:], strict=False))
            shared = {tile: ((value & _MASK_64) >> 32, value & _MASK) for tile, value in halves.items()}
            self._parts[index].append(TilePart(word_count, total, complete & _MASK_64, shared))
        self._digested, self._of_kernel = [], []
        self._parts = [[merge_parts(parts)] for parts in self._parts]
        return [part for (part,) in self._parts]

    def _launch(self, kernels: ModuleType) -> None:
        self._digested.append(kernels.launch(self._pending, _SEEDS))
        self._pending, self._bytes = [], 0


def compile_hash(device: torch.device) -> None:
    """Compile the hash kernel for this kind of device before the first push: it takes seconds once."""
    if device.type == "cuda":
        digests = PartDigests()
        digests.add(torch.zeros(TILE + 1, dtype=torch.int32, device=device), 0, TILE + 1)
        digests.results()


def _kernels(device: torch.device) -> ModuleType | None:
    """Return the module rlsys/ops/tensor_digest.py if it supports `device`."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return importlib.import_module("rlsys.ops.tensor_digest")  # Triton takes seconds to import


def _word_parts(kernels: ModuleType, data: Tensor, start: int, total: int) -> Iterator[tensor_digest.Part]:
    """Yield the words of `data` in place, or as a copy if they are not aligned.

    The bytes of an incomplete last word are copied, followed by zeros.
    """
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
    word_count, tail_bytes = divmod(len(flat), 4)
    if word_count:
        yield kernels.Part(flat, word_count, start, total, word_count, word_count)
    if tail_bytes:
        tail = torch.nn.functional.pad(flat[4 * word_count :], (0, 4 - tail_bytes))
        yield kernels.Part(tail, 1, start + word_count, total, 1, 1)


class TileHash:
    """The GPU hash in plain torch, incrementally.

    It stores the bytes of an incomplete tile, and 16 bytes for each tile of 32 KiB. `start`: words of the
    tensor before the first part, if another rank has those.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._count = start  # words up to the last that is in `_sums`
        self._tail: Tensor | None = None  # bytes
        self._sums: list[Tensor] = []  # of [2, tiles] int64, each below 2^32: the two halves

    def update(self, part: Tensor) -> None:
        data, tile = _bytes(part), 4 * TILE
        offset = 4 * self._count % tile  # only before the first tile's end: another rank has what is before
        if self._tail is not None or offset:
            tail = data[:0] if self._tail is None else self._tail
            need = min(tile - offset - len(tail), len(data))
            head, data = torch.cat([tail, data[:need]]), data[need:]
            self._tail = None
            if offset + len(head) < tile:
                self._tail = head
                return
            self._add(_as_words(head))
        complete_bytes = len(data) - len(data) % tile
        for start in range(0, complete_bytes, 4 * _AT_ONCE):
            self._add(_as_words(data[start : min(start + 4 * _AT_ONCE, complete_bytes)]))
        if complete_bytes < len(data):
            self._tail = data[complete_bytes:].clone()  # not a view: it would keep all of the part

    def digest(self) -> str:
        """Return the hash of a whole tensor, and reset. A tensor without elements has the hash 0."""
        return final_hash([self.part(None)]) or ""

    def part(self, total: int | None) -> TilePart:
        """Return the intermediate hash of the words so far, and reset.

        `total`: number of words of the tensor; None if these are all.
        """
        if self._tail is not None and len(self._tail):
            self._add(_as_words(torch.nn.functional.pad(self._tail, (0, -len(self._tail) % 4))))
        total = self._count if total is None else total
        shared: dict[int, tuple[int, int]] = {}
        complete = 0
        if self._sums:
            high, low = torch.cat(self._sums, 1)
            first, last = self._start // TILE, self._start // TILE + len(high) - 1
            edges = [first] if self._start % TILE else []
            edges += [last] if self._count % TILE and self._count != total and last not in edges else []
            for tile in edges:
                shared[tile] = int(high[tile - first]), int(low[tile - first])
            inner = slice(int(first in edges), len(high) - int(last in edges and last != first))
            complete = _sum_of_tiles(high[inner], low[inner], total)
        word_count = self._count - self._start
        self._sums, self._tail = [], None
        return TilePart(word_count, total, complete, shared)

    def _add(self, values: Tensor) -> None:
        """Add values of words, `[n]` int64 below 2^32, that end with a tile, except for the last call."""
        index = torch.arange(self._count, self._count + len(values), device=values.device) & _MASK
        halves = []
        for seed, (factor, turn) in zip(_SEEDS, _INDEX_MIXERS, strict=True):
            rotated = ((index << turn) & _MASK) | (index >> (32 - turn))
            mixed = _finish(values ^ (((index * factor + seed) & _MASK) ^ rotated))
            offset = self._count % TILE
            edges = offset, -(offset + len(mixed)) % TILE
            halves.append(torch.nn.functional.pad(mixed, edges).view(-1, TILE).sum(1) & _MASK)
        self._sums.append(torch.stack(halves))
        self._count += len(values)


def _bytes(part: Tensor) -> Tensor:
    return part.detach().contiguous().view(-1).view(torch.uint8)


def _as_words(data: Tensor) -> Tensor:
    """Return bytes as int64 words of four bytes."""
    if data.storage_offset() % 4:
        data = data.clone()  # a view as int32 needs an aligned start
    return data.view(torch.int32).long() & _MASK


def _finish(x: HashValue) -> HashValue:
    """Apply MurmurHash3's fmix32 to values below 2^32. Products of int64 wrap; the low 32 bits are exact."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _sum_of_tiles(high: Tensor, low: Tensor, total: int) -> int:
    """Return the sum of finalized tiles with these halves."""
    size = (4 * total) & _MASK
    hashes = (_finish(high ^ size) << 32) | _finish(low ^ size)
    return int(hashes.sum()) & _MASK_64  # int64 wraps, as uint64 does


def _finish_64(x: int) -> int:
    """Apply SplitMix64's finalizer."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK_64
    return x ^ (x >> 31)
