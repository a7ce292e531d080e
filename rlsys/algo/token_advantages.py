"""Helpers for advantages that differ between tokens: whitening, scans over trained tokens, masks of last tokens.

Shapes: T packed tokens.
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
    """Compute (x - mean) / (std + eps), with mean and std over the counted tokens of all ranks.

    The divisor of the variance is n - 1. The result is 0 if all values are equal up to rounding.

    Args:
        values: x, `[T]` for each packed batch of this rank.
        parts: the batches.
        reduce: sum over ranks.
        eps: added to the standard deviation.

    Returns:
        `[T]` for each batch; 0 where masked.
    """
    is_counted = [p.counted_tokens for p in parts]

    def total(terms: list[Tensor]) -> Tensor:
        """Return the sum of `terms`, `[T]` for each batch, over the counted tokens of all ranks."""
        sums = [term[mask].double().sum() for term, mask in zip(terms, is_counted, strict=True)]
        return reduce(torch.stack(sums).sum())

    count = total([torch.ones_like(v) for v in values])
    mean = total(list(values)) / count.clamp(min=1)
    square = total([v.double() ** 2 for v in values]) / count.clamp(min=1)
    variance = total([(v.double() - mean) ** 2 for v in values]) / (count - 1).clamp(min=1)
    scale = torch.where(variance > REWARD_TOLERANCE**2 * square, 1 / (variance.sqrt() + eps), 0.0)
    return [p.masked(((v - mean) * scale).to(v.dtype)) for v, p in zip(values, parts, strict=True)]


def on_trained(part: Batch, values: Tensor, scan: Any) -> Tensor:
    """Apply a scan to the trained tokens, as if the other tokens did not exist.

    Args:
        part: a packed batch.
        values: `[T]`.
        scan: function of values and sequence indices of the trained tokens, `[n]` each, that returns `[n]`.

    Returns:
        `[T]`; 0 on tokens that are not trained.
    """
    return torch.zeros_like(values).masked_scatter(part.keep, scan(values[part.keep], part.ids[part.keep]))


def last_token(part: Batch) -> Tensor:
    """Return the mask of the last trained token of each sequence, `[T]` bool."""
    position = torch.arange(len(part.mask), device=part.mask.device)
    last = torch.full((part.sequences,), -1, dtype=torch.long, device=part.mask.device)
    last = last.scatter_reduce(0, part.ids[part.keep], position[part.keep], "amax")
    mask = torch.zeros_like(part.keep)
    mask[last[last >= 0]] = True
    return mask


def turn_ends(part: Batch) -> Tensor:
    """Return the mask of the last trained token of each turn, `[T]` bool."""
    trained = part.keep.nonzero().flatten()
    turns = part.signal("turns")[trained]
    ids = part.ids[trained]
    is_last = torch.ones_like(trained, dtype=torch.bool)
    is_last[:-1] = (turns[1:] != turns[:-1]) | (ids[1:] != ids[:-1])
    mask = torch.zeros_like(part.keep)
    mask[trained[is_last]] = True
    return mask
