"""Combine HF tensors into a Megatron parameter and take them apart again. Pure, full (unsharded) tensors.

Shapes: hidden h, heads n, key-value groups g, head size d, feed-forward f. q `[n d, h]`, k and v `[g d, h]`;
linear_qkv `[g (n/g + 2) d, h]`; gate and up `[f, h]`, linear_fc1 `[2 f, h]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from rlsys.convert.families import Rule
from rlsys.convert.hf import HFConfig
from rlsys.errors import UserError


def to_megatron(rule: Rule, parts: list[Tensor], config: HFConfig) -> Tensor:
    if rule.layout == "qkv":
        g, d = config.kv_heads, config.head_dim
        q, k, v = (p.reshape(g, -1, d, *p.shape[1:]) for p in parts)
        return torch.cat([q, k, v], dim=1).reshape(-1, *parts[0].shape[1:])
    if rule.layout == "gate_up":
        return torch.cat(parts, dim=0)
    return parts[0]


def to_hf(rule: Rule, tensor: Tensor, config: HFConfig) -> list[Tensor]:
    """The inverse of to_megatron, bit for bit. Parts may be views of `tensor`."""
    if rule.layout == "qkv":
        g, d, queries = config.kv_heads, config.head_dim, config.heads // config.kv_heads
        grouped = tensor.reshape(g, queries + 2, d, *tensor.shape[1:])
        return [
            grouped[:, a:b].reshape(-1, *tensor.shape[1:])
            for a, b in ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))
        ]
    if rule.layout == "gate_up":
        return list(tensor.chunk(2, dim=0))
    return [tensor]


@dataclass(frozen=True)
class Entry:
    """One parameter of a whole model: its name there, and the HF tensors (name -> shape) that make it up.

    `megatron` has a place `{e}` for the expert's number, because each expert-parallel rank counts its own.
    """

    rule: Rule
    megatron: str
    hf: dict[str, tuple[int, ...]]
    expert: int | None = None


def entries(config: HFConfig) -> Iterator[Entry]:
    """Every parameter of a whole model, once: embedding, layer by layer, head. The order never changes."""
    for per_layer, rules in groupby(config.family.rules, key=lambda rule: rule.per_layer):
        kept = [r for r in rules if not (config.tied and r.megatron == "output_layer.weight")]
        for layer in range(config.layers) if per_layer else [0]:
            for rule in kept:
                for expert in range(config.experts) if rule.per_expert else [None]:
                    shapes = {
                        name.format(l=layer, e=expert): config.shape(dims) for name, dims in rule.hf.items()
                    }
                    yield Entry(rule, rule.megatron.format(l=layer, e="{e}"), shapes, expert)


def check_names(config: HFConfig, present: frozenset[str], where: str) -> None:
    """Every tensor accounted for. Raises UserError that names the first missing or unknown tensor."""
    expected = {name for entry in entries(config) for name in entry.hf}
    if config.tied:
        present = present - {"lm_head.weight"}
    if missing := sorted(expected - present):
        raise UserError(f"{where}: {len(missing)} tensor(s) are missing, first: {missing[0]}")
    if extra := sorted(present - expected):
        raise UserError(f"{where}: {len(extra)} tensor(s) have no place in the model, first: {extra[0]}")
