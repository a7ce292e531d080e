"""Attention over packed sequences, `qkv_format="thd"`: `[tokens, heads, head size]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Any = None, sequence_parallel: bool = False, tp_size: int = 1,
        get_rng_state_tracker: Any = None, tp_group: Any = None, layer_number: int | None = None,
        attention_type: str = "self", cp_group: Any = None, cp_global_ranks: Any = None, cp_stream: Any = None,
        cp_comm_type: str = "p2p", softmax_scale: float | None = None, softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        assert tp_size == 1 and cp_group is None and attention_dropout == 0.0
        self._scale = softmax_scale

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None: ...

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None = None,
        qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
        window_size: Any = None, checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Any = None, alibi_slopes: Any = None,
        fast_zero_fill: bool = True, inference_params: Any = None, pad_between_seqs: bool | None = None,
        fp8_output: bool = False, num_splits: int = 1,
    ) -> Tensor:  # fmt: skip
        assert qkv_format == "thd" and attn_mask_type == "padding_causal"
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32, "cuDNN takes int32"
        assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_kv, int)
        assert query_layer.dim() == 3 and int(cu_seqlens_q[-1]) == len(query_layer)
        sizes = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist()
        assert min(sizes) > 0 and max(sizes) <= max_seqlen_q
        outputs = []
        for q, k, v in zip(*(t.split(sizes) for t in (query_layer, key_layer, value_layer)), strict=True):
            # [1, heads, tokens, head size]: without the batch dimension, torch uses another kernel than rlsys
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            shared = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=shared
            )
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)
