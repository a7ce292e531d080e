"""Combine HF tensors into a Megatron parameter and take them apart again. Pure, full (unsharded) tensors.

Shapes: hidden h, heads n, key-value groups g, head size d, feed-forward f. q `[n d, h]`, k and v `[g d, h]`;
linear_qkv `[g (n/g + 2) d, h]`; gate and up `[f, h]`, linear_fc1 `[2 f, h]`.
"""

from __future__ import annotations

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


def names(config: HFConfig) -> list[tuple[Rule, str, tuple[str, ...]]]:
    """Every (rule, Megatron name, HF names) of a whole model, layer by layer, in a fixed order."""
    out = []
    for rule in config.family.rules:
        if rule.megatron == "output_layer.weight" and config.tied:
            continue
        layers = range(config.layers) if "{l}" in rule.megatron else [0]
        for layer in layers:
            for expert in range(config.experts) if "{e}" in rule.megatron else [0]:
                keys = {"l": layer, "e": expert}
                out.append((rule, rule.megatron.format(**keys), tuple(n.format(**keys) for n in rule.hf)))
    return out


def check_names(config: HFConfig, present: frozenset[str], where: str) -> None:
    """Every tensor accounted for. Raises UserError that names the first missing or unknown tensor."""
    expected = {n for _, _, hf in names(config) for n in hf}
    if config.tied:
        present = present - {"lm_head.weight"}
    if missing := sorted(expected - present):
        raise UserError(f"{where}: {len(missing)} tensors are missing, first: {missing[0]}")
    if extra := sorted(present - expected):
        raise UserError(f"{where}: {len(extra)} tensors have no place in the model, first: {extra[0]}")
