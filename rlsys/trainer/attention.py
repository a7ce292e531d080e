"""Core attention over packed sequences where there is no Transformer Engine.

Shapes: T packed tokens, n heads, g key-value groups, d head size. query `[T, n, d]`, key and value `[T, g, d]`
(megatron's "thd" format), output `[T, n d]`. No token attends outside its own sequence.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

SEQUENCES_AT_ONCE = 16


class PackedAttention(DotProductAttention):
    """Causal attention, several neighbouring sequences padded into one call; `pack` puts equal lengths side by side.

    Padding stands behind the real keys, so the causal mask alone hides it.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        lengths = (packed_seq_params.cu_seqlens_q[1:] - packed_seq_params.cu_seqlens_q[:-1]).tolist()
        queries, keys, values = (torch.split(t, lengths) for t in (query, key, value))
        out: list[Tensor] = []
        for at in range(0, len(lengths), SEQUENCES_AT_ONCE):
            part = slice(at, at + SEQUENCES_AT_ONCE)
            q, k, v = (
                pad_sequence(list(t[part]), batch_first=True).transpose(1, 2) for t in (queries, keys, values)
            )
            attended = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            ).transpose(1, 2)
            out.extend(attended[i, :n] for i, n in enumerate(lengths[part]))
        return torch.cat(out).flatten(1)
