"""SGLang's LoRA adapters on a host without CUDA: no pinned memory, experts with adapters in plain torch.

hooks.py registers these replacements only for an engine with --enable-lora.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CONSTRUCTORS = ("tensor", "zeros", "empty", "arange", "full")


def disable_pinned_memory() -> None:
    """Make torch ignore requests for pinned memory, which it refuses without CUDA.

    SGLang 0.5.23 requests it throughout its LoRA code, without an option.
    """

    def unpinned(construct: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(construct)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            kwargs.pop("pin_memory", None)
            return construct(*args, **kwargs)

        return wrapper

    for name in _CONSTRUCTORS:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def no_kernel_tables(*_: Any, **__: Any) -> tuple[None, None]:
    """Return no tables of tokens and adapters, which only a Triton kernel needs."""
    return None, None


def experts_with_adapters(layer: Any, hidden_states: Tensor, topk_output: Any, **options: Any) -> Tensor:
    """Compute the experts of a layer, each token with the adapter of its request.

    For each slot and expert the pool has A `[2 R, h]` and B `[2 m, R]` of gate and up, A `[R, m]` and B `[h, R]` of
    down, where R is the largest rank. B is already scaled by alpha / rank.

    Args:
        layer: SGLang's FusedMoEWithLoRA.
        hidden_states: `[tokens, h]`, ordered by request.
        topk_output: Ids and weights of each token's experts.

    Returns: `[tokens, h]`, combined over ranks.
    """
    batch = layer.lora_backend.batch_info
    base = layer.base_layer
    if batch is None:
        return base.forward(hidden_states, topk_output, **options)
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    base.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    out, first = torch.zeros_like(hidden_states), 0
    for slot, length in zip(batch.weight_indices_cpu.tolist(), batch.seg_lens_cpu.tolist(), strict=False):
        rank = int(batch.lora_ranks_cpu[slot])
        rows = slice(first, first + length)
        x, expert_ids, weights = (
            hidden_states[rows],
            topk_output.topk_ids[rows],
            topk_output.topk_weights[rows],
        )
        for expert in expert_ids.unique().tolist():
            token, k = (expert_ids == expert).nonzero(as_tuple=True)
            y = _expert(layer, expert, slot, rank, x[token])
            out[rows].index_add_(0, token, y * weights[token, k, None].to(y.dtype))
        first += length
    return base.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=out))


def _expert(layer: Any, expert: int, slot: int, rank: int, x: Tensor) -> Tensor:
    """Compute one expert with the adapter in `slot`; rank 0: no adapter. x `[t, h]` -> `[t, h]`."""
    base = layer.base_layer
    gate, up = (x @ base.w13_weight[expert].T).chunk(2, dim=1)
    if rank:
        a, b = (w[slot, expert] for w in (layer.gate_up_lora_a_weights, layer.gate_up_lora_b_weights))
        largest, half = a.shape[0] // 2, b.shape[0] // 2
        gate = gate + x @ a[:rank].T @ b[:half, :rank].T
        up = up + x @ a[largest : largest + rank].T @ b[half:, :rank].T
    hidden = torch.nn.functional.silu(gate) * up
    y: Tensor = hidden @ base.w2_weight[expert].T
    if rank:
        a, b = (w[slot, expert] for w in (layer.down_lora_a_weights, layer.down_lora_b_weights))
        y = y + hidden @ a[:rank].T @ b[:, :rank].T
    return y


REPLACED: dict[str, Callable[..., Any]] = {
    "sglang.srt.lora.backend.base_backend._compute_moe_lora_info": no_kernel_tables,
    "sglang.srt.lora.layers.FusedMoEWithLoRA.forward": experts_with_adapters,
}
"""SGLang's function -> its replacement."""
