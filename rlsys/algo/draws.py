"""Random numbers of samples and tokens that break ties: functions of a seed and of what is drawn for, nothing else.

Neither the order in which groups finished, which goes with their length, nor the layout changes them. Shapes: N
samples of the step, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.segments import group_index

MANTISSA = 2.0**32


def sample_draws(samples: Samples, seed: int = 0) -> Tensor:
    """A number in [0, 1) for each sample, `[N]` float64, on the CPU: of the seed, the step and the sample."""
    keys = sample_keys(samples).cpu()
    return mix(keys + mix(torch.full_like(keys, seed * 1_000_003 + samples.step))).double() / MANTISSA


def sample_keys(samples: Samples) -> Tensor:
    """An integer for each sample, `[N]`: its id; in a table without ids, of its group and its place within it."""
    if samples.sample_ids is not None:
        return samples.sample_ids.long()
    index, sizes = group_index(samples.group_ids)
    order = torch.argsort(index, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[index[order]]
    return mix(samples.group_ids.long()) * 65_537 + place


def token_draws(batch: Batch) -> Tensor:
    """A number in [0, 1) for each token, `[T]` float64: of the step's version, the sample and the token's place in
    its sequence."""
    place = torch.arange(len(batch.tokens), device=batch.tokens.device) - batch.cu_seqlens.long()[batch.ids]
    rows = (
        batch.rows.long()
        if batch.sample_keys is None
        else batch.sample_keys.to(batch.rows.device)[batch.rows]
    )
    mixed = mix(mix(rows[batch.ids] + mix(torch.full_like(place, batch.version))) + place)
    return mixed.double() / MANTISSA


def ordered(values: Tensor, draws: Tensor) -> Tensor:
    """The places of `values` `[n]` from the smallest to the largest; `draws` `[n]` order equal values."""
    first = torch.argsort(draws)
    return first[torch.argsort(values[first], stable=True)]


def mix(values: Tensor) -> Tensor:
    """Integers `[n]` to well-mixed ones below 2^32: xor-shifts and products that stay within 63 bits."""
    values = values & 0xFFFFFFFF
    for _ in range(2):
        values = ((values >> 16) ^ values) * 0x45D9F3B & 0xFFFFFFFF
    return (values >> 16) ^ values
