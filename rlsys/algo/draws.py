"""Random numbers that break ties between samples or between tokens.

They depend only on a seed and the sample or token: neither on the layout, nor on the order in which groups finish,
which correlates with response length. Shapes: N samples of the step, T tokens of a packed batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.segments import group_index

MANTISSA = 2.0**32


def sample_draws(samples: Samples, seed: int = 0) -> Tensor:
    """Draw a number in [0, 1) for each sample, `[N]` float64, on the CPU, from the seed, the step and the sample."""
    keys = sample_keys(samples).cpu()
    return mix(keys + mix(torch.full_like(keys, seed * 1_000_003 + samples.step))).double() / MANTISSA


def sample_keys(samples: Samples) -> Tensor:
    """Return an integer for each sample, `[N]`: its id, or without ids a hash of its group and its rank therein."""
    if samples.sample_ids is not None:
        return samples.sample_ids.long()
    index, sizes = group_index(samples.group_ids)
    order = torch.argsort(index, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[index[order]]
    return mix(samples.group_ids.long()) * 65_537 + position


def token_draws(batch: Batch) -> Tensor:
    """Draw a number in [0, 1) for each token, `[T]` float64.

    It depends on the weight version of the step, the sample, and the token's position in its sequence.
    """
    position = (
        torch.arange(len(batch.tokens), device=batch.tokens.device) - batch.cu_seqlens.long()[batch.ids]
    )
    rows = (
        batch.rows.long()
        if batch.sample_keys is None
        else batch.sample_keys.to(batch.rows.device)[batch.rows]
    )
    mixed = mix(mix(rows[batch.ids] + mix(torch.full_like(position, batch.version))) + position)
    return mixed.double() / MANTISSA


def argsort_with_draws(values: Tensor, draws: Tensor) -> Tensor:
    """Return the indices of `values` `[n]` in ascending order; equal values are in the order of `draws` `[n]`."""
    first = torch.argsort(draws)
    return first[torch.argsort(values[first], stable=True)]


def mix(values: Tensor) -> Tensor:
    """Hash the low 32 bits of integers `[n]` to integers below 2^32, by xor-shifts and products below 2^63."""
    values = values & 0xFFFFFFFF
    for _ in range(2):
        values = ((values >> 16) ^ values) * 0x45D9F3B & 0xFFFFFFFF
    return (values >> 16) ^ values
