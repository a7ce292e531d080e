"""SGLang's digest of a GPU tensor as one Triton kernel over the parts of many tensors.

SGLang (0.5.23, `sglang/kernels/ops/memory/gpu_tensor_hash.py`) mixes each 32-bit word with its index by MurmurHash3's
finalizer, with two different seeds for the two halves of the digest. It adds the words of a tile of 8,192 words,
applies the finalizer to each tile's sum, and adds the tiles.

A launch in this module digests any number of parts of tensors. A program processes one tile of one part at a time. It
adds the finished tile to the part's sum, or stores the unfinished sums of a tile that the part shares with another
part. A launch allocates 24 bytes per part. The module needs Triton, which supports CPU tensors with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
"""Number of words of a tile."""
BLOCK = 1024
"""Number of words that a program loads at once."""
WARPS = 4
PROGRAMS = 1024
"""Maximum number of programs per part; each processes every PROGRAMS-th tile."""
_COLUMNS = 6
"""Number of columns of the table of parts."""


@dataclass(frozen=True)
class Part:
    """Consecutive 32-bit words of a tensor, stored in memory as `length / row` rows.

    Attributes:
        data: Tensor that starts at the first word, and keeps the memory allocated.
        length: Number of words.
        start: Index of the first word in the whole tensor.
        total: Number of words of the whole tensor.
        row: Number of words of a row.
        stride: Number of words between the starts of consecutive rows.
    """

    data: Tensor
    length: int
    start: int
    total: int
    row: int
    stride: int


@triton.jit
def _finish(x):  # type: ignore[no-untyped-def]
    x ^= x >> 16
    x = x * tl.full((), 0x85EBCA6B, tl.uint32)
    x ^= x >> 13
    x = x * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def tile_digests(  # type: ignore[no-untyped-def]
    table,
    out,
    SEED_HIGH: tl.constexpr,
    SEED_LOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Digest tiles of parts.

    Args:
        table: `[parts, COLUMNS]` int64: address, length, start, total, row, stride.
        out: `[parts, 3]` uint64, initially 0: sum of the finished tiles, and the unfinished sums of the first and the
            last tile if the part contains only some of their words.
    """
    part = tl.program_id(1)
    line = table + part * COLUMNS
    length = tl.load(line + 1)
    start = tl.load(line + 2)
    total = tl.load(line + 3)
    row = tl.load(line + 4)
    stride = tl.load(line + 5)
    base = tl.load(line).to(tl.pointer_type(tl.uint32))
    end = start + length
    first = start // TILE
    last = (end - 1) // TILE
    size = (total * 4).to(tl.uint32)
    column = tl.arange(0, BLOCK)
    tile = first + tl.program_id(0)
    while tile <= last:
        begin = tile * TILE
        lowest = tl.maximum(start - begin, 0).to(tl.int32)
        highest = tl.minimum(end - begin, TILE).to(tl.int32)
        high = tl.zeros((BLOCK,), tl.uint32)
        low = tl.zeros((BLOCK,), tl.uint32)
        for offset in range(0, TILE, BLOCK):
            index = offset + column
            inside = (index >= lowest) & (index < highest)
            at = (begin - start) + index
            if row < length:
                at = at // row * stride + at % row
            value = tl.load(base + at, mask=inside, other=0)
            position = begin.to(tl.uint32) + index.to(tl.uint32)
            key_high = (position * tl.full((), 0x27D4EB2D, tl.uint32) + SEED_HIGH) ^ (
                (position << 15) | (position >> 17)
            )
            key_low = (position * tl.full((), 0x165667B1, tl.uint32) + SEED_LOW) ^ (
                (position << 13) | (position >> 19)
            )
            high += tl.where(inside, _finish(value ^ key_high), 0)
            low += tl.where(inside, _finish(value ^ key_low), 0)
        sum_high = tl.sum(high, axis=0).to(tl.uint32)
        sum_low = tl.sum(low, axis=0).to(tl.uint32)
        tile_end = tl.minimum(begin + TILE, total)
        slot = out + part * 3
        if begin < start:
            tl.store(slot + 1, (sum_high.to(tl.uint64) << 32) | sum_low.to(tl.uint64))
        elif end < tile_end:
            tl.store(slot + 2, (sum_high.to(tl.uint64) << 32) | sum_low.to(tl.uint64))
        else:
            finished_high = _finish(sum_high ^ size).to(tl.uint64)
            tl.atomic_add(slot, (finished_high << 32) | _finish(sum_low ^ size).to(tl.uint64))
        tile += tl.num_programs(0)


def interpreted() -> bool:
    """Return whether Triton interprets kernels, which can then process CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(parts: Sequence[Part], seeds: tuple[int, int]) -> Tensor:
    """Digest parts of tensors in one launch, without waiting for its end.

    Args:
        parts: At least one part; all parts are on one device.
        seeds: Seeds of the high and the low half of the digest, below 2^32.

    Returns:
        `[parts, 3]` int64: the sum of the finished tiles modulo 2^64, and the unfinished sums, high << 32 | low, of
        the first and the last tile if the part contains only some of their words; otherwise 0.
    """
    device = parts[0].data.device
    rows = [[p.data.data_ptr(), p.length, p.start, p.total, p.row, p.stride] for p in parts]
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    out = torch.zeros(len(parts), 3, dtype=torch.int64, device=device)
    tiles = max((p.start + p.length - 1) // TILE - p.start // TILE + 1 for p in parts)
    tile_digests[(min(PROGRAMS, tiles), len(parts))](
        table,
        out.view(torch.uint64),
        SEED_HIGH=seeds[0],
        SEED_LOW=seeds[1],
        TILE=TILE,
        BLOCK=BLOCK,
        COLUMNS=_COLUMNS,
        num_warps=WARPS,
    )
    return out
