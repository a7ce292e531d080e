"""Reductions across ranks: sums over data-parallel ranks, and global thresholds.

A plug-in never sees the layout. It gets whole sequences of its own rank (the trainer gathers the results of
context-parallel ranks, see rlsys.trainer.model.context_parallel), the table of all samples, and a `Reduce` that sums
a tensor over the ranks that hold other sequences. Its decisions from such sums are equal on every rank and for every
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Element-wise sum of equally shaped tensors over ranks; every rank gets the result."""

Condition = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(edges `[E]`, how many values are <= edge `[E]`, their sum `[E]`) -> holds `[E]`, false from some edge on."""


def single_rank(values: Tensor) -> Tensor:
    """Return the values: the Reduce of one rank."""
    return values


def table_sum(values: Sequence[Tensor], rows: Sequence[Tensor], samples: int, reduce: Reduce) -> Tensor:
    """Sum the values `[S]` of every rank's sequences at their rows of the sample table. `[samples]`, float64."""
    device = values[0].device if values else torch.device("cpu")
    out = torch.zeros(samples, dtype=torch.float64, device=device)
    for value, row in zip(values, rows, strict=True):
        out = out.index_add(0, row.to(device), value.double())
    return reduce(out)


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
    """Return the largest value in [low, high] for which `holds`, to (high - low) / bins^rounds.

    `low` if it never does.

    Values `[n]` of all ranks are counted into bins that are refined around the answer, so that no rank sorts or reads
    another's tokens, and the answer does not depend on the layout.
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
