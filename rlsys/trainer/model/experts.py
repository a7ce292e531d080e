"""Megatron's experts, one module each, computed as one grouped GEMM (rlsys/ops/grouped_gemm.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rlsys.ops import grouped_gemm

SUBMODULES = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
"""Submodules of an expert; only their weights are used if experts are computed together."""


class GroupedExperts(SequentialMLP):
    """Experts with SequentialMLP's parameters and checkpoints, computed together if possible.

    Experts with biases or adapters, and inputs that torch's grouped GEMM does not support, are computed one by one,
    as upstream does.
    """

    local_experts: torch.nn.ModuleList

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _InMemoryOrder(self.local_experts)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states `[T, H]` sorted by expert, tokens_per_expert `[E]`, probs `[T]` to `[T, H]`, no bias."""
        x = permuted_local_hidden_states
        layers: list[tuple[Any, Any]] = [(e.linear_fc1, e.linear_fc2) for e in self.local_experts]
        first, second = (
            [layer.weight for layer in expert_layers] for expert_layers in zip(*layers, strict=True)
        )
        unsupported = self.config.add_bias_linear or self.config.moe_apply_probs_on_input
        adapted = any(layer._forward_hooks for pair in layers for layer in pair)
        if (
            unsupported
            or adapted
            or not (grouped_gemm.supported(x, first) and grouped_gemm.supported(x, second))
        ):
            out: tuple[Tensor, Tensor | None] = super().forward(x, tokens_per_expert, permuted_probs)
            return out
        ends = tokens_per_expert.cumsum(0).to(torch.int32)
        if x.is_cuda and not ends.is_cuda:
            ends = ends.pin_memory().to(x.device, non_blocking=True)
        inner = self._activation(grouped_gemm.grouped_linear(x, ends, first))
        inner = (inner * permuted_probs.unsqueeze(-1)).to(inner.dtype)
        return grouped_gemm.grouped_linear(inner, ends, second), None

    def _activation(self, x: Tensor) -> Tensor:
        """Apply the activation function as MLP.forward does without fusions."""
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, linear = x.chunk(2, dim=-1)
        if (bound := config.activation_func_clamp_value) is not None:
            gate, linear = gate.clamp(max=bound), linear.clamp(-bound, bound)
        return config.activation_func(gate) * (linear + config.glu_linear_offset)


class _InMemoryOrder(torch.nn.ModuleList):
    """Module list that registers its modules from the last to the first.

    Megatron lays out the parameters of a model in reverse order, so that experts are in memory in the order of the
    tokens.
    """

    def __init__(self, modules: torch.nn.ModuleList) -> None:
        super().__init__()
        for number in reversed(range(len(modules))):
            self.add_module(str(number), modules[number])

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (self[number] for number in range(len(self)))


def set_experts(layer: Any) -> None:
    """Use these experts in a layer's spec if it has experts that are computed one by one."""
    mlp = layer.mlp.submodules
    if getattr(getattr(mlp, "experts", None), "module", None) is SequentialMLP:
        mlp.experts = ModuleSpec(module=GroupedExperts, submodules=SUBMODULES)
