"""Sums and scans over the samples of a group and the tokens of a sequence. Pure functions.

Shapes: T packed tokens, S sequences, N samples, G groups. `ids` `[T]` is each token's sequence, ascending.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_index(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return (index of each sample's group `[N]`, samples per group `[G]`) of any integer ids `[N]`."""
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return index, sizes


def groups_of(group_ids: Tensor) -> list[Tensor]:
    """Return the indices of each group's samples among `[N]`, in their order."""
    index, sizes = group_index(group_ids)
    return list(torch.split(torch.argsort(index, stable=True), sizes.tolist()))


def sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the sum of `values` `[n]` for each value of `index` `[n]`, `[count]`."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, index, values)


def max_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the maximum of `values` `[n]`, which must not be negative, for each value of `index` `[n]`, `[count]`;
    0 for none."""
    out = torch.zeros(count, dtype=values.dtype, device=values.device)
    return out.scatter_reduce(0, index, values, "amax")


def merge_close(values: Tensor, group_ids: Tensor, scale: Tensor, tolerance: float) -> Tensor:
    """Return `values` `[N]` in which values of a group that are equal up to a tolerance are replaced by the smallest.

    The tolerance is `tolerance` times the group's largest `scale` `[N]`.
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
    """Return the mean of `values` `[N]` within each sample's group, `[N]`. It is exact for equal values."""
    index, sizes = group_index(group_ids)
    start = torch.zeros(len(sizes), dtype=torch.float64, device=values.device)
    start = start.scatter_reduce(0, index, values.double(), "amin", include_self=False)
    return (start + sum_by(values.double() - start[index], index, len(sizes)) / sizes)[index].to(values.dtype)


def group_std(values: Tensor, group_ids: Tensor) -> Tensor:
    """Return the standard deviation with n - 1 within each sample's group, `[N]`; 0 in a group of one."""
    index, sizes = group_index(group_ids)
    squares = sum_by((values - group_mean(values, group_ids)) ** 2, index, len(sizes))
    return (squares / (sizes - 1).clamp(min=1)).sqrt()[index]


def discounted_suffix_sum(values: Tensor, ids: Tensor, factor: float | Tensor) -> Tensor:
    """Compute y_t = x_t + factor * y_{t+1} within each sequence, `[T]`, in log2(longest) vector operations.

    `factor`: one number, or `[T]`, the same for all tokens of a sequence.
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
    """Compute min of x_j over j <= t (or j < t, +inf at a sequence's first token) within each sequence, `[T]`."""
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
    """Return 1, 2, 4, ... below the longest run of equal ids."""
    longest = int(torch.bincount(ids).max()) if len(ids) else 0
    out, step = [], 1
    while step < longest:
        out.append(step)
        step *= 2
    return out
