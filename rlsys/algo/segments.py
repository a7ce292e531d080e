"""Sums and scans over the samples of a group and over the tokens of a sequence, as pure functions.

Shapes: T packed tokens, N samples, G groups. `ids` `[T]` is the index of each token's sequence, ascending.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_index(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each sample's group, `[N]`, and the number of samples of each group, `[G]`.

    Args:
        group_ids: group of each sample, `[N]` integers in any order.
    """
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return index, sizes


def groups_of(group_ids: Tensor) -> list[Tensor]:
    """Return the ascending indices of each group's samples in `group_ids` `[N]`."""
    index, sizes = group_index(group_ids)
    return list(torch.split(torch.argsort(index, stable=True), sizes.tolist()))


def sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the sum of the `values` `[n]` with each index 0 to count - 1 in `index` `[n]`, as `[count]`."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)


def max_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the maximum of the `values` `[n]` with each index 0 to count - 1 in `index` `[n]`, as `[count]`.

    The values must be at least 0; the maximum of none is 0.
    """
    out = torch.zeros(count, dtype=values.dtype, device=values.device)
    return out.scatter_reduce(0, index, values, "amax")


def merge_close(values: Tensor, group_ids: Tensor, scale: Tensor, tolerance: float) -> Tensor:
    """Replace values of a group that are equal up to rounding by the smallest of them.

    In the group's sorted values, neighbours are equal if they differ by at most `tolerance` times the largest `scale`
    of the group.

    Args:
        values: `[N]`.
        group_ids: group of each value, `[N]`.
        scale: magnitude of each value, `[N]`.
        tolerance: relative tolerance.

    Returns:
        The new values, `[N]`.
    """
    index, sizes = group_index(group_ids)
    by_value = torch.argsort(values, stable=True)
    order = by_value[torch.argsort(index[by_value], stable=True)]
    sorted_values, groups = values[order], index[order]
    limit = tolerance * max_by(scale.nan_to_num(0, 0, 0), index, len(sizes))[groups]
    first = torch.ones_like(groups, dtype=torch.bool)
    near = sorted_values[1:] - sorted_values[:-1] <= limit[1:]
    first[1:] = (groups[1:] != groups[:-1]) | ~near
    out = torch.empty_like(values)
    out[order] = sorted_values[first][first.long().cumsum(0) - 1]
    return out


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Return the mean of `values` `[N]` over each sample's group, `[N]`; without rounding error for equal values."""
    index, sizes = group_index(group_ids)
    start = torch.zeros(len(sizes), dtype=torch.float64, device=values.device)
    start = start.scatter_reduce(0, index, values.double(), "amin", include_self=False)
    return (start + sum_by(values.double() - start[index], index, len(sizes)) / sizes)[index].to(values.dtype)


def group_std(values: Tensor, group_ids: Tensor) -> Tensor:
    """Return the standard deviation over each sample's group, `[N]`, with divisor n - 1; 0 in a group of one."""
    index, sizes = group_index(group_ids)
    squares = sum_by((values - group_mean(values, group_ids)) ** 2, index, len(sizes))
    return (squares / (sizes - 1).clamp(min=1)).sqrt()[index]


def discounted_suffix_sum(values: Tensor, ids: Tensor, factor: float | Tensor) -> Tensor:
    """Compute y_t = x_t + factor * y_{t+1} within each sequence, `[T]`.

    The number of vector operations is the binary logarithm of the longest sequence.

    Args:
        values: x, `[T]`.
        ids: index of each token's sequence, `[T]`.
        factor: a number, or `[T]` with the same number for all tokens of a sequence.
    """
    out, weight = values.clone(), torch.as_tensor(factor, dtype=values.dtype, device=values.device)
    weight = weight.expand_as(values)
    for step in _doublings(ids):
        same_sequence = ids[:-step] == ids[step:]
        later = torch.where(same_sequence, out[step:], torch.zeros_like(out[step:]))
        out = torch.cat([out[:-step] + weight[:-step] * later, out[-step:]])
        weight = weight * weight
    return out


def running_min(values: Tensor, ids: Tensor, *, inclusive: bool) -> Tensor:
    """Compute the minimum of x_j over the tokens j <= t of the same sequence, `[T]`.

    Args:
        values: x, `[T]`.
        ids: index of each token's sequence, `[T]`.
        inclusive: false: the minimum is over j < t, and +inf at the first token of a sequence.
    """
    out = values.clone()
    if not inclusive and len(out):
        first = torch.ones_like(ids, dtype=torch.bool)
        first[1:] = ids[1:] != ids[:-1]
        out = out.roll(1).masked_fill(first, torch.inf)
    for step in _doublings(ids):
        same_sequence = ids[:-step] == ids[step:]
        earlier = torch.where(same_sequence, out[:-step], torch.full_like(out[:-step], torch.inf))
        out = torch.cat([out[:step], torch.minimum(out[step:], earlier)])
    return out


def _doublings(ids: Tensor) -> list[int]:
    """Return the powers of two below the number of tokens of the longest sequence."""
    longest = int(torch.bincount(ids).max()) if len(ids) else 0
    out, step = [], 1
    while step < longest:
        out.append(step)
        step *= 2
    return out
