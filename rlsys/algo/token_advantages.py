"""Helpers for advantages that differ between tokens: whitening, scans over trained tokens.

Shapes: N samples, T packed tokens. All statistics over tokens are sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.plugin import REWARD_TOLERANCE
from rlsys.algo.reduction import Reduce

Unit = Annotated[float, Field(ge=0, le=1)]


def whiten_tokens(
    values: Sequence[Tensor], parts: Sequence[Batch], reduce: Reduce, eps: float = 1e-6
) -> list[Tensor]:
    """Return (x - mean) / (std + eps), with mean and std (n - 1) over the counted tokens of all ranks; 0 where
    masked.

    If all values are equal up to rounding, the result is 0.
    """
    is_counted = [p.counted_tokens for p in parts]

    def total(fields: list[Tensor]) -> Tensor:
        return reduce(
            torch.stack([f[c].double().sum() for f, c in zip(fields, is_counted, strict=True)]).sum()
        )

    count = total([torch.ones_like(v) for v in values])
    mean = total(list(values)) / count.clamp(min=1)
    square = total([v.double() ** 2 for v in values]) / count.clamp(min=1)
    variance = total([(v.double() - mean) ** 2 for v in values]) / (count - 1).clamp(min=1)
    scale = torch.where(variance > REWARD_TOLERANCE**2 * square, 1 / (variance.sqrt() + eps), 0.0)
    return [p.masked(((v - mean) * scale).to(v.dtype)) for v, p in zip(values, parts, strict=True)]


def on_trained(part: Batch, values: Tensor, scan: Any) -> Tensor:
    """Apply `scan(values, ids)` to the sequence of only the trained tokens; return `[T]`, 0 on the other tokens."""
    return torch.zeros_like(values).masked_scatter(part.keep, scan(values[part.keep], part.ids[part.keep]))


def last_token(part: Batch) -> Tensor:
    """Return the mask of each sequence's last trained token, `[T]` bool."""
    position = torch.arange(len(part.mask), device=part.mask.device)
    last = torch.full((part.sequences,), -1, dtype=torch.long, device=part.mask.device)
    last = last.scatter_reduce(0, part.ids[part.keep], position[part.keep], "amax")
    out = torch.zeros_like(part.keep)
    out[last[last >= 0]] = True
    return out


def turn_ends(part: Batch) -> Tensor:
    """Return the mask of the last trained token of each turn, `[T]` bool."""
    index, turns = part.keep.nonzero().flatten(), part.signal("turns")[part.keep]
    ids, last = part.ids[part.keep], torch.ones_like(index, dtype=torch.bool)
    last[:-1] = (turns[1:] != turns[:-1]) | (ids[1:] != ids[:-1])
    out = torch.zeros_like(part.keep)
    out[index[last]] = True
    return out
