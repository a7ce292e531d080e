"""Reductions across ranks: sums over data-parallel ranks, and global thresholds.

A plug-in does not depend on the layout. It gets whole sequences of its own rank (the trainer gathers the results of
context-parallel ranks, see rlsys.trainer.model.context_parallel), the table of all samples, and a `Reduce` that sums
a tensor over the data-parallel ranks. Decisions from such sums are equal on every rank and in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Element-wise sum of equally shaped tensors over ranks; every rank gets the result."""

Condition = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(edges `[E]`, number of values <= edge `[E]`, their sum `[E]`) -> `[E]` bool: true up to an edge, false after
it."""


def single_rank(values: Tensor) -> Tensor:
    """Return `values`: the `Reduce` for a single rank."""
    return values


def table_sum(values: Sequence[Tensor], rows: Sequence[Tensor], samples: int, reduce: Reduce) -> Tensor:
    """Return the sum of all ranks' sequence values `[S]` for each row of the sample table, `[samples]` float64."""
    device = values[0].device if values else torch.device("cpu")
    sums = torch.zeros(samples, dtype=torch.float64, device=device)
    for value, row in zip(values, rows, strict=True):
        sums = sums.index_add(0, row.to(device), value.double())
    return reduce(sums)


def threshold(
    parts: Sequence[Tensor],
    holds: Condition,
    low: float,
    high: float,
    reduce: Reduce,
    *,
    bins: int = 1024,
    rounds: int = 3,
) -> float:
    """Return the largest value in [low, high] for which a condition holds, up to (high - low) / bins^rounds.

    All ranks count their values into bins, which are refined around the result in each round. So no rank needs the
    values of another one, and the result does not depend on the layout.

    Args:
        parts: values `[n]` of this rank.
        holds: the condition.
        low: lower limit, the result if the condition never holds.
        high: upper limit.
        reduce: sum over ranks.
        bins: number of bins.
        rounds: number of refinements.
    """
    start, end = low, high
    for _ in range(rounds):
        edges = torch.linspace(start, end, bins + 1, dtype=torch.float64)
        counts, sums = torch.zeros(bins + 2, dtype=torch.float64), torch.zeros(bins + 2, dtype=torch.float64)
        for part in parts:
            values = part.double()
            bucket = torch.bucketize(values, edges.to(values.device))
            counts += torch.bincount(bucket, minlength=bins + 2).cpu()
            sums += torch.bincount(bucket, weights=values, minlength=bins + 2).cpu()
        device = parts[0].device if parts else torch.device("cpu")
        counts, sums = reduce(torch.stack([counts, sums]).to(device)).cpu()
        good = holds(edges, counts.cumsum(0)[:-1], sums.cumsum(0)[:-1])
        last = int(good.long().cumprod(0).sum()) - 1
        if last < 0:
            return low
        if last == bins:
            return end
        start, end = float(edges[last]), float(edges[last + 1])
    return start
