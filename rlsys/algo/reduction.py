"""Reductions across ranks: sums over data-parallel ranks, and thresholds over the tokens of all ranks.

A plug-in receives whole sequences of its rank (rlsys.trainer.model.context_parallel gathers the results of
context-parallel ranks), the table of all samples, and a `Reduce`, which sums a tensor over the data-parallel ranks.
Decisions that use only the table and such sums are equal on every rank and in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Function that returns the element-wise sum of all ranks' tensors, on every rank. The shapes must be equal."""

Condition = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of (edges `[E]`, number of values <= each edge `[E]`, sum of these values `[E]`) that returns `[E]` bool:
true up to an edge, false for all later ones."""


def single_rank(values: Tensor) -> Tensor:
    """Return `values`: the `Reduce` for a single rank."""
    return values


def table_sum(values: Sequence[Tensor], rows: Sequence[Tensor], samples: int, reduce: Reduce) -> Tensor:
    """Sum values of sequences over each sample's sequences on all ranks.

    Args:
        values: values of the sequences, `[S]` for each packed batch of this rank.
        rows: row of each sequence in the sample table, `[S]` for each packed batch.
        samples: number of rows of the sample table.
        reduce: sum over ranks.

    Returns:
        `[samples]` float64.
    """
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

    In each round, all ranks count their values in bins between the edges around the result of the previous round. The
    result does not depend on the assignment of values to ranks.

    Args:
        parts: values of this rank, `[n]` each.
        holds: the condition.
        low: lower limit, and the result if the condition never holds.
        high: upper limit.
        reduce: sum over ranks.
        bins: number of bins.
        rounds: number of rounds.
    """
    start, end = low, high
    for _ in range(rounds):
        edges = torch.linspace(start, end, bins + 1, dtype=torch.float64)
        counts, sums = _histogram(parts, edges, reduce)
        is_true = holds(edges, counts.cumsum(0)[:-1], sums.cumsum(0)[:-1])
        last = int(is_true.long().cumprod(0).sum()) - 1
        if last < 0:
            return low
        if last == bins:
            return end
        start, end = float(edges[last]), float(edges[last + 1])
    return start


def _histogram(parts: Sequence[Tensor], edges: Tensor, reduce: Reduce) -> Tensor:
    """Return the number of values of all ranks in each bin, and their sum, `[2, E + 1]`.

    Bin i has the values above edge i - 1 and up to edge i; the last bin has the values above all edges.
    """
    counts = torch.zeros(len(edges) + 1, dtype=torch.float64)
    sums = torch.zeros_like(counts)
    for part in parts:
        values = part.double()
        bucket = torch.bucketize(values, edges.to(values.device))
        counts += torch.bincount(bucket, minlength=len(counts)).cpu()
        sums += torch.bincount(bucket, weights=values, minlength=len(counts)).cpu()
    device = parts[0].device if parts else torch.device("cpu")
    return reduce(torch.stack([counts, sums]).to(device)).cpu()
