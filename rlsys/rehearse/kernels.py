"""Memory and FLOPs of GPU kernels that a CPU lacks: fused attention, fused norm and grouped GEMM.

The functions follow the published behaviour of the kernels; they have not been compared with a GPU. Shapes are those
of rlsys.trainer.model.attention: T packed tokens of this rank, n heads, g key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

CountFlops = Callable[[int], None]
"""Adds a number of FLOPs to the current phase."""


class FlashAttention(torch.autograd.Function):
    """FlashAttention-2 (Dao 2023), which saves queries, keys, values, the output, and one number per head and query.

    It does not save the scores. The backward pass recomputes them, and needs 2.5 times the FLOPs of the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, flops: int, count: CountFlops) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.flops = flops
        ctx.count = count
        _ring(key, value)
        count(flops)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        ctx.count(ctx.flops * 5 // 2)
        _ring(key, value)
        _ring(key, value)  # keys and values are exchanged again, with their gradients
        torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def _ring(key: Tensor, value: Tensor) -> None:
    """Send keys and values around the ring of c context-parallel ranks, in c - 1 exchanges with the neighbours."""
    group = parallel_state.get_context_parallel_group()
    size, rank = group.size(), group.rank()
    ranks = dist.get_process_group_ranks(group)
    for _ in range(size - 1):
        block = key.new_empty(key.numel() + value.numel())
        received = torch.empty_like(block)
        dist.isend(block, ranks[(rank + 1) % size], group)
        dist.irecv(received, ranks[rank - 1], group)


class FusedNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class GroupedGemm(torch.autograd.Function):
    """Product of tokens `[T, in]`, sorted by expert, with their experts' weights, `[T, out]`. It saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: CountFlops, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.count = count
        count(2 * x.shape[0] * weights[0].numel())
        return x.new_empty(x.shape[0], weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        ctx.count(4 * x.shape[0] * weights[0].numel())
        return (torch.empty_like(x), None, *(torch.empty_like(w) for w in weights))


def attention(upstream: Callable[..., Tensor], count: CountFlops) -> Callable[..., Tensor]:
    """Return a replacement of PackedAttention.forward that represents a kernel for sequences of different lengths.

    Micro-batches with shared tokens still use PackedAttention, with `padded_attention` as its kernel.

    Args:
        upstream: PackedAttention.forward.
        count: Adds FLOPs.
    """

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attn_mask_type: Any = None,
        attention_bias: Any = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        if packed_seq_params.prefixes:
            return upstream(self, query, key, value, None, packed_seq_params=packed_seq_params)
        ranks = parallel_state.get_context_parallel_group().size()
        # Two FLOPs per pair and element, but the causal mask excludes half of the pairs.
        pairs = sum(n**2 for n in packed_seq_params.lengths)
        flops = pairs * query.shape[1] * (query.shape[2] + value.shape[2]) // ranks
        out: Tensor = FlashAttention.apply(query, key, value, flops, count)
        return out.flatten(1)

    return forward


def padded_attention(count: CountFlops) -> Callable[..., Tensor]:
    """Return a replacement of `without_sinks`.

    It counts half of the pairs of a causal square, which a kernel skips, but all pairs of an explicit mask.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        pairs = q.shape[:-1].numel() * k.shape[2] * (1 if mask is None else 2)
        by_token = (t.transpose(1, 2) for t in (q, k, v))
        out: Tensor = FlashAttention.apply(*by_token, pairs * (q.shape[3] + v.shape[3]), count)
        return out.transpose(1, 2)

    return attend


def norm(self: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    """Return FusedNorm of x; replaces torch.nn.RMSNorm.forward."""
    out: Tensor = FusedNorm.apply(x, self.weight)
    return out


def experts(count: CountFlops) -> Callable[..., tuple[Tensor, None]]:
    """Return a replacement of SequentialMLP.forward by grouped GEMMs.

    The replacement raises ValueError if `tokens_per_expert` does not add up to the number of tokens.
    """

    def forward(self: Any, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        if int(tokens_per_expert.sum()) != hidden.shape[0]:
            raise ValueError(
                f"tokens_per_expert adds up to {int(tokens_per_expert.sum())}; expected {hidden.shape[0]} tokens"
            )
        first = GroupedGemm.apply(hidden, count, *(e.linear_fc1.weight for e in self.local_experts))
        gate, up = first.chunk(2, -1)
        inner = self.config.activation_func(gate) * up
        inner = (inner * probs.unsqueeze(-1)).to(inner.dtype)
        return GroupedGemm.apply(inner, count, *(e.linear_fc2.weight for e in self.local_experts)), None

    return forward
