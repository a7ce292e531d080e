"""SGLang's two tensor hashes, computed from parts of a tensor: 64 bits in hexadecimal.

A CPU engine hashes bytes with SHA-256. A CUDA engine runs SGLang's kernel (0.5.23,
`sglang/kernels/ops/memory/gpu_tensor_hash.py`): it mixes each 32-bit word with its index (MurmurHash3's
32-bit finalizer, twice with different seeds), sums the words of tiles of 8,192, finalizes the tiles and sums them.
SGLang's kernel needs the whole tensor, but a sum over tiles can be computed from parts. `PartDigests` does so for the
parts of many tensors at once, with rlsys/ops/tensor_digest.py; `TileHash` does so in plain torch, on any device.
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
"""Number of words in a tile."""
HashValue = TypeVar("HashValue", int, Tensor)
_MAX_WORDS = 512 * TILE
"""Largest number of words that TileHash hashes at once. Its temporary tensors have eight bytes per word."""


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
    """Intermediate hash of a part of a tensor.

    Attributes:
        word_count: number of words of the part.
        total: number of words of the tensor; the hash of each tile depends on it.
        complete: sum of the finalized tiles that lie in this part.
        shared: index of each tile that lies only partly in this part -> the two halves of the sum over its words.
    """

    word_count: int
    total: int
    complete: int
    shared: dict[int, tuple[int, int]]


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

    The memory of a part must not change until the kernel has digested it. If Triton does not support the device
    (for example one that a test simulates), parts are digested one by one in plain torch.
    """

    def __init__(self) -> None:
        self._pending: list[tensor_digest.Part] = []
        self._bytes = 0
        self._digested: list[Tensor] = []
        self._kernel_parts: list[tuple[int, int, int, int]] = []
        """For each row of the kernel's results: index of the part, number of words, first word and total."""
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
            self._kernel_parts.append((index, part.length, part.start, part.total))
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
        for (index, word_count, start, total), row in zip(self._kernel_parts, rows, strict=True):
            self._parts[index].append(_tile_part(word_count, start, total, row))
        self._digested, self._kernel_parts = [], []
        self._parts = [[merge_parts(parts)] for parts in self._parts]
        return [part for (part,) in self._parts]

    def _launch(self, kernels: ModuleType) -> None:
        self._digested.append(kernels.launch(self._pending, _SEEDS))
        self._pending, self._bytes = [], 0


def _tile_part(word_count: int, start: int, total: int, row: Sequence[int]) -> TilePart:
    """Return the intermediate hash of a part from the kernel's result.

    Args:
        word_count: number of words of the part.
        start: index of its first word in the tensor.
        total: number of words of the tensor.
        row: the kernel's result: sum of the finalized tiles, and the sums of a shared first and last tile.
    """
    complete, first_sum, last_sum = row
    end = start + word_count
    shared_sums: dict[int, int] = {}
    if start % TILE:
        shared_sums[start // TILE] = first_sum
    if end % TILE and end != total:
        shared_sums.setdefault(end // TILE, last_sum)
    shared = {tile: ((value & _MASK_64) >> 32, value & _MASK) for tile, value in shared_sums.items()}
    return TilePart(word_count, total, complete & _MASK_64, shared)


def compile_hash(device: torch.device) -> None:
    """Compile the hash kernel for this kind of device. It takes seconds, so do it before the first push."""
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
    """Yield the words of `data`: in place if its rows are aligned, else as a copy.

    An incomplete last word is a part of its own, padded with zeros. The arguments are those of PartDigests.add.
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
    """Computes the GPU hash incrementally, in plain torch.

    It stores the bytes of an incomplete tile, and 16 bytes for each tile of 32 KiB.
    """

    def __init__(self, start: int = 0) -> None:
        """Start the hash. `start`: index of the first word in the tensor; other parts have the words before it."""
        self._start = start
        self._count = start
        """Index of the word after the last one in `_sums`."""
        self._tail: Tensor | None = None
        """Bytes of an incomplete tile, `[bytes]` uint8."""
        self._sums: list[Tensor] = []
        """The two halves of the sums of consecutive tiles, `[2, tiles]` int64 below 2^32."""

    def update(self, part: Tensor) -> None:
        """Hash the next elements of the tensor."""
        data, tile = _bytes(part), 4 * TILE
        offset = 4 * self._count % tile  # above 0 only in the first tile, if other parts have its first words
        if self._tail is not None or offset:
            tail = data[:0] if self._tail is None else self._tail
            missing = min(tile - offset - len(tail), len(data))
            head = torch.cat([tail, data[:missing]])
            data = data[missing:]
            self._tail = None
            if offset + len(head) < tile:
                self._tail = head
                return
            self._add(_as_words(head))
        complete_bytes = len(data) - len(data) % tile
        for start in range(0, complete_bytes, 4 * _MAX_WORDS):
            self._add(_as_words(data[start : min(start + 4 * _MAX_WORDS, complete_bytes)]))
        if complete_bytes < len(data):
            self._tail = data[complete_bytes:].clone()  # a view would keep the whole part in memory

    def digest(self) -> str:
        """Return the hash of a whole tensor. Call it once, after the last `update`.

        A tensor without elements has the hash 0.
        """
        return final_hash([self.part(None)]) or ""

    def part(self, total: int | None) -> TilePart:
        """Return the intermediate hash of the words so far, and free their memory.

        Call it once, after the last `update`.

        Args:
            total: number of words of the tensor; None if the hashed words are the whole tensor.
        """
        if self._tail is not None and len(self._tail):
            self._add(_as_words(torch.nn.functional.pad(self._tail, (0, -len(self._tail) % 4))))
        total = self._count if total is None else total
        shared: dict[int, tuple[int, int]] = {}
        complete = 0
        if self._sums:
            high, low = torch.cat(self._sums, 1)
            tiles = len(high)
            edges = self._edge_tiles(tiles, total)
            for tile in edges:
                shared[self._start // TILE + tile] = int(high[tile]), int(low[tile])
            inner = slice(int(0 in edges), tiles - int(tiles - 1 in edges))
            complete = _sum_of_tiles(high[inner], low[inner], total)
        word_count = self._count - self._start
        self._sums, self._tail = [], None
        return TilePart(word_count, total, complete, shared)

    def _edge_tiles(self, tiles: int, total: int) -> list[int]:
        """Return the indices of the tiles that other parts share.

        These are a first tile that begins before this part, and a last tile that ends after it.

        Args:
            tiles: number of tiles of this part.
            total: number of words of the tensor.
        """
        edges = {0} if self._start % TILE else set()
        if self._count % TILE and self._count != total:
            edges.add(tiles - 1)
        return sorted(edges)

    def _add(self, values: Tensor) -> None:
        """Add the next words, up to the end of a tile; only the last call may end within a tile.

        Args:
            values: the words as numbers, `[n]` int64 below 2^32.
        """
        index = torch.arange(self._count, self._count + len(values), device=values.device) & _MASK
        halves = []
        for seed, (factor, rotation) in zip(_SEEDS, _INDEX_MIXERS, strict=True):
            rotated = ((index << rotation) & _MASK) | (index >> (32 - rotation))
            mixed = _finish(values ^ (((index * factor + seed) & _MASK) ^ rotated))
            offset = self._count % TILE
            edges = offset, -(offset + len(mixed)) % TILE
            halves.append(torch.nn.functional.pad(mixed, edges).view(-1, TILE).sum(1) & _MASK)
        self._sums.append(torch.stack(halves))
        self._count += len(values)


def _bytes(part: Tensor) -> Tensor:
    return part.detach().contiguous().view(-1).view(torch.uint8)


def _as_words(data: Tensor) -> Tensor:
    """Return bytes as words of four bytes, `[bytes / 4]` int64 below 2^32."""
    if data.storage_offset() % 4:
        data = data.clone()  # a view as int32 needs an aligned start
    return data.view(torch.int32).long() & _MASK


def _finish(x: HashValue) -> HashValue:
    """Apply MurmurHash3's fmix32 to values below 2^32. Products of int64 wrap; the low 32 bits are exact."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _sum_of_tiles(high: Tensor, low: Tensor, total: int) -> int:
    """Finalize tiles, and return the sum of their hashes modulo 2^64.

    Args:
        high: upper halves of the tiles' sums, `[tiles]` int64 below 2^32.
        low: lower halves.
        total: number of words of the tensor.
    """
    size = (4 * total) & _MASK
    hashes = (_finish(high ^ size) << 32) | _finish(low ^ size)
    return int(hashes.sum()) & _MASK_64  # int64 wraps, as uint64 does


def _finish_64(x: int) -> int:
    """Apply SplitMix64's finalizer."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK_64
    return x ^ (x >> 31)
