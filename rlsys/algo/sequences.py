"""Sums over the earlier or later sequences of a sample, which may be on different ranks.

Shapes: N samples of the step, K at least the largest number of sequences of a sample, S sequences of one packed
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.reduction import Reduce


def sequence_indices(part: Batch) -> Tensor:
    """Return the index of each sequence in its sample, `[S]`, from 0."""
    if part.sequence_index:
        return torch.tensor(part.sequence_index, device=part.rows.device)
    same_sample = (part.rows[:, None] == part.rows[None, :]).long()
    return same_sample.tril(-1).sum(1)


def sequence_table(parts: Sequence[Batch], values: Sequence[Tensor], samples: int, reduce: Reduce) -> Tensor:
    """Return the values of all sequences of all ranks by sample and index in the sample.

    Args:
        parts: packed batches of this rank.
        values: value of each sequence, `[S]` for each batch.
        samples: number of samples of the step.
        reduce: sum over ranks.

    Returns:
        `[N, K]` float64; 0 where a sample has no sequence of the index. K is a power of two.
    """
    device = values[0].device
    indices = [sequence_indices(part).to(device) for part in parts]
    longest = max([int(index.max()) + 1 for index in indices if len(index)], default=1)
    # `reduce` only sums, so each rank marks its exponent, and the largest one with a mark gives the width.
    exponents = torch.zeros(32, dtype=torch.float64, device=device)
    exponents[(longest - 1).bit_length()] = 1
    width = 2 ** int(reduce(exponents).nonzero().max())
    table = torch.zeros(samples * width, dtype=torch.float64, device=device)
    for part, index, value in zip(parts, indices, values, strict=True):
        trained = part.lengths_or_zero > 0  # a copy that fills a bin has no trained tokens
        cells = part.rows.to(device)[trained] * width + index[trained]
        table.index_add_(0, cells, value.double()[trained])
    return reduce(table).view(samples, width)


def at_sequences(part: Batch, table: Tensor) -> Tensor:
    """Return the entry of `table` `[N, K]` for each sequence of a packed batch, `[S]`."""
    return table[part.rows.to(table.device), sequence_indices(part).to(table.device)]


def sums_before(table: Tensor) -> Tensor:
    """Return for each entry of `table` `[N, K]` the sum over the earlier sequences of the sample, `[N, K]`."""
    return table.cumsum(1) - table


def sums_after(table: Tensor) -> Tensor:
    """Return for each entry of `table` `[N, K]` the sum over the later sequences of the sample, `[N, K]`."""
    return table.flip(1).cumsum(1).flip(1) - table


def minimum_before(table: Tensor) -> Tensor:
    """Return for each entry of `table` `[N, K]` the minimum over the earlier sequences of the sample, `[N, K]`.

    The minimum for the first sequence is inf.
    """
    minimum = table.cummin(1).values
    return torch.cat([torch.full_like(minimum[:, :1], torch.inf), minimum[:, :-1]], 1)
