"""Samples of several sequences: sums over the earlier or later sequences of a sample, which may be on any rank.

Shapes: N samples of the step, K sequences of the sample with most, S sequences and T tokens of one part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.reduction import Reduce


def sequence_indices(part: Batch) -> Tensor:
    """Return the index of each sequence within its sample, `[S]`, from 0."""
    if part.sequence_index:
        return torch.tensor(part.sequence_index, device=part.rows.device)
    same_sample = (part.rows[:, None] == part.rows[None, :]).long()
    return same_sample.tril(-1).sum(1)


def sequence_table(parts: Sequence[Batch], values: Sequence[Tensor], samples: int, reduce: Reduce) -> Tensor:
    """Return a table `[N, K]` float64 of the values `[S]` of all sequences of all ranks; 0 without a sequence."""
    device = values[0].device
    indices = [sequence_indices(part).to(device) for part in parts]
    longest = max([int(p.max()) + 1 for p in indices if len(p)], default=1)
    powers = torch.zeros(
        32, dtype=torch.float64, device=device
    )  # ranks can only add: the largest power has one
    powers[(longest - 1).bit_length()] = 1
    width = 2 ** int(reduce(powers).nonzero().max())
    table = torch.zeros(samples * width, dtype=torch.float64, device=device)
    for part, index, value in zip(parts, indices, values, strict=True):
        trained = part.lengths_or_zero > 0  # a copy that fills a bin has no trained tokens
        at = part.rows.to(device)[trained] * width + index[trained]
        table.index_add_(0, at, value.double()[trained])
    return reduce(table).view(samples, width)


def at_sequences(part: Batch, table: Tensor) -> Tensor:
    """Return the entries of `table` `[N, K]` for this part's sequences, `[S]`."""
    return table[part.rows.to(table.device), sequence_indices(part).to(table.device)]


def sums_before(table: Tensor) -> Tensor:
    """Return the sum over the earlier sequences of the sample, `[N, K]`."""
    return table.cumsum(1) - table


def sums_after(table: Tensor) -> Tensor:
    """Return the sum over the later sequences of the sample, `[N, K]`."""
    return table.flip(1).cumsum(1).flip(1) - table


def least_before(table: Tensor) -> Tensor:
    """Return the minimum over the earlier sequences of the sample, `[N, K]`; inf for the first sequence."""
    least = table.cummin(1).values
    return torch.cat([torch.full_like(least[:, :1], torch.inf), least[:, :-1]], 1)
