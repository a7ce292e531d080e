"""Combine HF tensors into a Megatron parameter and take them apart again. Pure, full (unsharded) tensors.

Shapes: hidden h, heads n, key-value groups g, head size d, feed-forward f. q `[n d, h]`, k and v `[g d, h]`;
linear_qkv `[g (n/g + 2) d, h]`; gate and up `[f, h]`, linear_fc1 `[2 f, h]`. Biases have no h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.rules import Layout, Rule


@dataclass(frozen=True)
class Combination:
    """`join` HF tensors, and `part` them again, bit for bit; parts may be views.

    `sections`: the parameter's equal sections along the axis of the cut. Each is cut over ranks by itself, so that a
    rank holds matching parts of all of them.
    """

    join: Callable[[list[Tensor], HFConfig], Tensor]
    part: Callable[[Tensor, HFConfig], list[Tensor]]
    sections: int = 1


def _join_qkv(parts: list[Tensor], config: HFConfig) -> Tensor:
    g, d = config.kv_heads, config.head_dim
    q, k, v = (p.reshape(g, -1, d, *p.shape[1:]) for p in parts)
    return torch.cat([q, k, v], dim=1).reshape(-1, *parts[0].shape[1:])


def _part_qkv(tensor: Tensor, config: HFConfig) -> list[Tensor]:
    g, d, queries = config.kv_heads, config.head_dim, config.heads // config.kv_heads
    grouped = tensor.reshape(g, queries + 2, d, *tensor.shape[1:])
    return [part.reshape(-1, *tensor.shape[1:]) for part in grouped.split([queries, 1, 1], dim=1)]


LAYOUTS: dict[Layout, Combination] = {
    "same": Combination(lambda parts, _: parts[0], lambda tensor, _: [tensor]),
    "qkv": Combination(_join_qkv, _part_qkv),
    "gate_up": Combination(
        lambda parts, _: torch.cat(parts, dim=0), lambda tensor, _: list(tensor.chunk(2, dim=0)), sections=2
    ),
}


def to_megatron(rule: Rule, parts: list[Tensor], config: HFConfig) -> Tensor:
    return LAYOUTS[rule.layout].join(parts, config)


def to_hf(rule: Rule, tensor: Tensor, config: HFConfig) -> list[Tensor]:
    """The inverse of to_megatron, bit for bit. Parts may be views of `tensor`."""
    return LAYOUTS[rule.layout].part(tensor, config)


def sections(rule: Rule) -> int:
    """See Combination."""
    return LAYOUTS[rule.layout].sections
