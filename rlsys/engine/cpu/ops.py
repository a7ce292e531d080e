"""SGLang's operators that need CUDA, in plain torch, for hosts without CUDA.

If an engine fails on another operator without CUDA, add it to REPLACED or AROUND.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlsys.engine.cpu import delta


def add_gated(hidden: Tensor, gate: Tensor, shared: Tensor, output: Tensor) -> None:
    """Add sigmoid(hidden @ gate) * shared to `output` in place: Qwen2-MoE's gate of the shared experts.

    hidden, shared and output: `[tokens, h]`; gate: `[h]` or `[1, h]`.
    """
    output.add_(shared * (hidden @ gate.reshape(-1, 1)).sigmoid())


def sums_of_squares(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the sums of squares for MiniMax-M2's norm over all heads.

    Args:
        queries: `[tokens, width]`.
        keys: `[tokens, width]`.

    Returns:
        Sums of the queries, then sums of the keys, then zeros up to a multiple of 4; float32.
    """
    both = torch.cat([x.float().pow(2).sum(-1) for x in (queries, keys)])
    return torch.nn.functional.pad(both, (0, -len(both) % 4))


def norm_by_sums(
    queries: Tensor,
    keys: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    sums: Tensor,
    tp_world: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Apply MiniMax-M2's norm to queries and keys.

    Args:
        queries: `[tokens, width]`.
        keys: `[tokens, width]`.
        query_weight: `[width]`.
        key_weight: `[width]`.
        sums: Result of sums_of_squares, summed over all ranks.
        tp_world: Number of ranks.
        eps: Added to the mean of squares.
    """
    tokens = len(queries)

    def norm(x: Tensor, weight: Tensor, squares: Tensor) -> Tensor:
        scale = torch.rsqrt(squares[:, None] / (x.shape[1] * tp_world) + eps)
        return (x.float() * scale * weight.float()).to(x.dtype)

    return (
        norm(queries, query_weight, sums[:tokens]),
        norm(keys, key_weight, sums[tokens : 2 * tokens]),
    )


def general_rope(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Create a rotary embedding in plain torch, because SGLang's CPU version supports only DeepSeek's YaRN."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    scaling = kwargs.get("rope_scaling", args[5] if len(args) > 5 else None)
    if scaling is not None and scaling.get("rope_type") == "deepseek_yarn":
        return upstream(*args, **kwargs)
    return get_rope(*args[:8], **{name: value for name, value in kwargs.items() if name != "device"})


def topk_with_flat_bias(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's top-k routing: flatten the router bias, which Ernie-4.5 stores as `[1, experts]`."""
    if (bias := kwargs.get("correction_bias")) is not None:
        kwargs["correction_bias"] = bias.flatten()
    elif len(args) > 4 and args[4] is not None:
        args = (*args[:4], args[4].flatten(), *args[5:])
    return upstream(*args, **kwargs)


def padded_linear(
    upstream: Callable[..., Tensor], rows: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Pad products of fewer than BLOCK rows with rows of zeros, for deterministic inference.

    MKL sums in another order for one to three rows, so a token's result would depend on the number of tokens in its
    forward pass or its expert.
    """
    if rows.dim() != 2 or not 0 < len(rows) < BLOCK:
        return upstream(rows, weight, bias)
    return upstream(torch.nn.functional.pad(rows, (0, 0, 0, BLOCK - len(rows))), weight, bias)[: len(rows)]


def padded_lm_head(
    upstream: Callable[..., Tensor], processor: Any, hidden: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Pad the product of the LM head like padded_linear, because SGLang computes it with matmul.

    hidden: `[tokens, h]`.
    """
    if not 0 < len(hidden) < BLOCK:
        return upstream(processor, hidden, *args, **kwargs)
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, BLOCK - len(hidden)))
    return upstream(processor, padded, *args, **kwargs)[: len(hidden)]


def attention_with_sinks(
    upstream: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    batch: Any,
    save_kv_cache: bool = True,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention with sinks in prefill and decode. Layers without sinks use SGLang's function.

    A sink is an additional key of each head with a learnt logit and the value 0. SGLang's torch_native backend has no
    sinks, and reads windowed layers from the wrong pool. q: `[tokens, n d]`.
    """
    if sinks is None:
        return upstream(backend, q, k, v, layer, batch, save_kv_cache, **options)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if save_kv_cache:
        pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    window = layer.sliding_window_size if (layer.sliding_window_size or -1) > -1 else None
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    decoding = batch.extend_seq_lens is None or batch.forward_mode.is_decode()
    lengths = [1] * len(batch.seq_lens) if decoding else batch.extend_seq_lens.tolist()
    out = []
    for i, part in enumerate(queries.split(lengths)):
        locations = backend.req_to_token_pool.req_to_token[
            batch.req_pool_indices[i], : int(batch.seq_lens[i])
        ]
        if window is not None and backend.use_sliding_window_kv_pool:
            locations = pool.translate_loc_from_full_to_swa(locations)
        out.append(attend(part, keys[locations], values[locations], layer.scaling, window, sinks))
    return torch.cat(out).flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor) -> Tensor:
    """Compute causal attention with sinks for the last tokens of one sequence.

    Args:
        q: Queries of the last tokens, `[a, n, d]`.
        k: Keys of all tokens, `[b, g, d]`.
        v: Values of all tokens, `[b, g, d]`.
        scale: Factor of the scores.
        window: Number of earlier keys to which a query attends; None for all.
        sinks: Logit of each head's sink, `[n]`.

    Returns: `[a, n, d]` of q.dtype.
    """
    tokens, length, groups = len(q), len(k), k.shape[1]
    position = torch.arange(length - tokens, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    mask = key <= position if window is None else (key <= position) & (key >= position - window)
    by_group = q.float().unflatten(1, (groups, -1)).permute(1, 2, 0, 3)  # [g, n / g, a, d]
    scores = by_group @ k.float().permute(1, 2, 0)[:, None] * scale
    sink = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores.masked_fill(~mask, float("-inf")), sink], dim=-1).softmax(-1)[..., :-1]
    # A location outside the window may contain any value, also NaN.
    values = v.float().permute(1, 0, 2)[:, None]
    values = torch.where(mask.any(0)[:, None], values, 0.0)
    return (weights @ values).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def decode_batched(
    upstream: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    encoder_lens: Tensor | None = None,
    scaling: float | None = None,
    sliding_window_size: int | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention of a decode step for requests of similar length together.

    SGLang's torch_native backend computes one request at a time, which takes a third of an engine's time. This
    function pads requests to a multiple of WIDTH tokens and batches those of the same width. The products of a
    request are separate, so its result does not depend on the other requests.

    Args:
        query: `[s, n, d]`.
        output: `[s, n, e]`, written in place and returned.
        keys: `[slots, g, d]`.
        values: `[slots, g, e]`.
        table: `table[r, i]` is the slot of token i of request r.
        requests: Row of each request in `table`, `[s]`.
        lengths: Number of tokens of each request, `[s]`.
    """
    if encoder_lens is not None or sliding_window_size is not None:
        return upstream(
            backend, query, output, keys, values, table, requests, lengths, encoder_lens,
            scaling=scaling, sliding_window_size=sliding_window_size, **options,
        )  # fmt: skip
    groups, size = keys.shape[1:]
    scale = scaling if scaling is not None else size**-0.5
    widths = ((lengths + WIDTH - 1) // WIDTH * WIDTH).clamp(max=table.shape[1])
    for width in widths.unique().tolist():
        rows = (widths == width).nonzero()[:, 0]
        for part in rows.split(max(1, MAX_GATHERED // (width * groups * size))):
            mask = torch.arange(width, device=lengths.device) < lengths[part, None]
            slots = table[requests[part], :width]
            slots = torch.where(mask, slots, slots[:, :1]).flatten()  # an unused slot may contain NaN
            k, v = (x.index_select(0, slots).float().unflatten(0, (-1, width)) for x in (keys, values))
            q = query[part].float().unflatten(1, (groups, -1)) * scale
            for head in range(groups):
                scores = torch.bmm(q[:, head], k[:, :, head].transpose(1, 2))
                weights = scores.masked_fill_(~mask[:, None], float("-inf")).softmax(-1)
                attended = torch.bmm(weights, v[:, :, head]).to(output.dtype)
                output.unflatten(1, (groups, -1))[part, head] = attended
    return output


WIDTH = 32
"""decode_batched pads requests to a multiple of this number of tokens."""
MAX_GATHERED = 2**22
"""Largest number of elements of keys that are gathered at once: 16 MB."""
BLOCK = 4
"""Smallest number of rows with which MKL's result for a row does not depend on the other rows."""
_TORCH_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
REPLACED: dict[str, Callable[..., Any]] = {
    **delta.REPLACED,
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add": add_gated,
    "sglang.srt.models.minimax_m2.rms_sumsq_serial": sums_of_squares,
    "sglang.srt.models.minimax_m2.rms_apply_serial": norm_by_sums,
}
"""SGLang's operator -> its replacement."""
AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu": general_rope,
    "sglang.srt.layers.moe.topk.fused_topk_torch_native": topk_with_flat_bias,
    "sglang.srt.layers.moe.topk.fused_topk_native": topk_with_flat_bias,
    _TORCH_NATIVE + "forward_extend": attention_with_sinks,
    _TORCH_NATIVE + "forward_decode": attention_with_sinks,
    _TORCH_NATIVE + "_run_sdpa_forward_decode": decode_batched,
}
"""SGLang's operator -> its wrapper, which gets SGLang's function as first argument."""
DETERMINISTIC: dict[str, Callable[..., Any]] = {
    "torch.nn.functional.linear": padded_linear,
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": padded_lm_head,
}
"""Wrappers for an engine with `--enable-deterministic-inference` only."""
