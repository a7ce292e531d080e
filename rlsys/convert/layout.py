"""Composition of Hugging Face tensors into a Megatron parameter, and its inverse. Pure; tensors are not sharded.

Shapes: h hidden size, n heads, g key-value groups, d head size, f feed-forward size.

    q                   [n d, h]
    k, v                [g d, h]
    linear_qkv          [g (n/g + 2) d, h]
    gate, up            [f, h]
    linear_fc1          [2 f, h]

Biases lack the axis h.
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
    """Conversion between the Hugging Face tensors and the Megatron parameter of a layout.

    Attributes:
        join: (tensors, configuration) -> parameter.
        part: (parameter, configuration) -> tensors, the exact inverse; they may be views of the parameter.
        sections: Number of equal sections of the parameter along the shard axis. Each section is sharded separately,
            so that a rank holds matching parts of all sections.
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


def _join_gated(parts: list[Tensor], config: HFConfig) -> Tensor:
    g, d = config.kv_heads, config.head_dim
    queries, k, v = (p.reshape(g, -1, d, *p.shape[1:]) for p in parts)
    return torch.cat([queries[:, 0::2], queries[:, 1::2], k, v], dim=1).reshape(-1, *parts[0].shape[1:])


def _part_gated(tensor: Tensor, config: HFConfig) -> list[Tensor]:
    g, d, per_group = config.kv_heads, config.head_dim, config.heads // config.kv_heads
    grouped = tensor.reshape(g, 2 * per_group + 2, d, *tensor.shape[1:])
    q, gate, k, v = grouped.split([per_group, per_group, 1, 1], dim=1)
    queries = torch.stack([q, gate], dim=2)
    return [part.reshape(-1, *tensor.shape[1:]) for part in (queries, k, v)]


def _delta_sections(config: HFConfig) -> tuple[int, list[int], list[int]]:
    """Return the number of key heads, and the channels of queries, keys and values in total and per key head."""
    assert config.delta is not None
    n = config.delta.key_heads
    sizes = config.delta.sections
    return n, sizes, [size // n for size in sizes]


def _join_by_key_head(parts: list[Tensor], config: HFConfig) -> Tensor:
    (tensor,) = parts
    heads, sizes, _ = _delta_sections(config)
    by_head = [x.reshape(heads, -1, *x.shape[1:]) for x in tensor.split(sizes)]
    return torch.cat(by_head, dim=1).reshape(tensor.shape)


def _part_by_key_head(tensor: Tensor, config: HFConfig) -> list[Tensor]:
    heads, _, head_sizes = _delta_sections(config)
    by_head = tensor.reshape(heads, -1, *tensor.shape[1:]).split(head_sizes, dim=1)
    return [torch.cat([x.reshape(-1, *tensor.shape[1:]) for x in by_head])]


def _join_vocabulary(parts: list[Tensor], config: HFConfig) -> Tensor:
    (rows,) = parts
    missing = config.padded_vocab_size - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


LAYOUTS: dict[Layout, Combination] = {
    "same": Combination(lambda parts, _: parts[0], lambda tensor, _: [tensor]),
    "qkv": Combination(_join_qkv, _part_qkv),
    "gated_qkv": Combination(_join_gated, _part_gated),
    "by_key_head": Combination(_join_by_key_head, _part_by_key_head),
    "gate_up": Combination(
        lambda parts, _: torch.cat(parts, dim=0), lambda tensor, _: list(tensor.chunk(2, dim=0)), sections=2
    ),
    "vocabulary": Combination(_join_vocabulary, lambda tensor, config: [tensor[: config.vocab_size]]),
}


def to_megatron(rule: Rule, parts: list[Tensor], config: HFConfig) -> Tensor:
    """Compose Hugging Face tensors into the Megatron parameter of a rule."""
    return LAYOUTS[rule.layout].join(parts, config)


def to_hf(rule: Rule, tensor: Tensor, config: HFConfig) -> list[Tensor]:
    """Split a Megatron parameter into Hugging Face tensors, which may be views; the exact inverse of to_megatron."""
    return LAYOUTS[rule.layout].part(tensor, config)


def sections(rule: Rule) -> int:
    """Return the number of separately sharded sections of a rule's parameter (see Combination)."""
    return LAYOUTS[rule.layout].sections
