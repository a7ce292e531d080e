"""Megatron's layer of one module per expert, computed by grouped GEMMs (rlsys/ops/grouped_gemm.py)."""

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
"""Submodules of an expert. A grouped GEMM uses only their weights."""


class GroupedExperts(SequentialMLP):
    """Experts with the parameters and checkpoints of SequentialMLP, computed by grouped GEMMs if possible.

    SequentialMLP computes experts with biases or adapters, and inputs that torch's grouped GEMM does not support, one
    by one.
    """

    local_experts: torch.nn.ModuleList

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _InMemoryOrder(self.local_experts)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the experts' outputs.

        Args:
            permuted_local_hidden_states: `[T, H]`, sorted by expert.
            tokens_per_expert: `[E]`.
            permuted_probs: `[T]`, weight of each token's output.

        Returns:
            `[T, H]`, and the bias of SequentialMLP, which is None for grouped GEMMs.
        """
        x = permuted_local_hidden_states
        layers: list[tuple[Any, Any]] = [(e.linear_fc1, e.linear_fc2) for e in self.local_experts]
        first, second = (
            [layer.weight for layer in expert_layers] for expert_layers in zip(*layers, strict=True)
        )
        unsupported = self.config.add_bias_linear or self.config.moe_apply_probs_on_input
        adapted = any(layer._forward_hooks for pair in layers for layer in pair)
        has_kernel = grouped_gemm.supported(x, first) and grouped_gemm.supported(x, second)
        if unsupported or adapted or not has_kernel:
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
    """Module list that registers its modules in reverse order.

    Megatron's buffers contain the parameters of a model in reverse order of registration. The experts' weights are
    therefore in memory in the order in which tokens are sorted.
    """

    def __init__(self, modules: torch.nn.ModuleList) -> None:
        super().__init__()
        for number in reversed(range(len(modules))):
            self.add_module(str(number), modules[number])

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (self[number] for number in range(len(self)))


def set_experts(layer: Any) -> None:
    """Replace SequentialMLP in a layer's spec by GroupedExperts, if the spec contains it."""
    mlp = layer.mlp.submodules
    if getattr(getattr(mlp, "experts", None), "module", None) is SequentialMLP:
        mlp.experts = ModuleSpec(module=GroupedExperts, submodules=SUBMODULES)
