"""Core attention over packed sequences where there is no Transformer Engine.

Shapes: T packed tokens of this rank, P padded ones, n heads, g key-value groups, d head size. query `[T, n, d]`,
key and value `[T, g, d]` (megatron's "thd" format), output `[T, n d]`. No token attends outside its own sequence.
Under context parallelism (c ranks) keys and values are gathered: right and simple, with all keys in memory.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Padding:
    """Where packed tokens stand once neighbouring sequences of similar length are padded into rectangles.

    `to_padded` `[P]` names the packed token of each padded place (padding repeats its sequence's first token),
    `to_packed` `[T]` the padded place of each packed token; `rectangles` are (sequences, longest length).
    """

    to_padded: Tensor
    to_packed: Tensor
    rectangles: list[tuple[int, int]]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Padding:
        """A rectangle ends where a sequence is longer than its first or shorter than three quarters of it."""
        rectangles: list[tuple[int, int]] = []
        for n in lengths:
            if rectangles and 3 * rectangles[-1][1] <= 4 * n <= 4 * rectangles[-1][1]:
                rectangles[-1] = (rectangles[-1][0] + 1, rectangles[-1][1])
            else:
                rectangles.append((1, n))
        widths = torch.tensor([longest for rows, longest in rectangles for _ in range(rows)])
        size = torch.tensor(lengths)
        start = size.cumsum(0) - size
        padded_start = widths.cumsum(0) - widths
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), widths)
        place = torch.arange(int(widths.sum())) - padded_start[sequence]
        to_padded = start[sequence] + torch.where(place < size[sequence], place, 0)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), size)
        to_packed = padded_start[owner] + torch.arange(int(size.sum())) - start[owner]
        return cls(to_padded.to(device), to_packed.to(device), rectangles)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, and what our own attention needs beside it.

    Lengths are those of whole sequences, also where context parallelism gives this rank a part of each. `place`
    `[c T]` then names where each token stands once the ranks' tokens are gathered.
    """

    lengths: list[int] = field(default_factory=list)
    place: Tensor | None = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, place: Tensor | None = None) -> PackedSequences:
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            place=None if place is None else place.to(device),
        )

    @cached_property
    def padding(self) -> Padding:
        """Worked out once for all layers, and never where Transformer Engine attends."""
        return Padding.of(self.lengths, self.cu_seqlens_q.device)


class PackedAttention(DotProductAttention):
    """Causal attention, one call for a rectangle of sequences; `pack` puts similar lengths side by side.

    Padding comes after the real keys, so the causal mask alone hides it. Windows and sinks (gpt-oss) are those that
    megatron's config tells: `window_size`, `window_attn_skip_freq`, `softmax_type`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Latent attention has other head sizes than the config's, which it tells; ours come with the tensors."""
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # upstream's refuses more; its own state does not depend on it
        super().__init__(alone, *args, **kwargs)
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        )
        self._before = config.window_size[0] if windowed else None
        """Keys before the query's own that it sees; None: all."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params=PackedSequences.of(...)")
        if packed_seq_params.place is not None:
            return self._chunks(query, key, value, packed_seq_params)
        padding = packed_seq_params.padding
        sizes = [rows * longest for rows, longest in padding.rectangles]
        # Padding adds exactly 0 to a gradient: no real query sees it, and what it attends to is dropped.
        queries, keys, values = (
            t.index_select(0, padding.to_padded).split(sizes) for t in (query, key, value)
        )
        out = []
        for (rows, longest), *qkv in zip(padding.rectangles, queries, keys, values, strict=True):
            q, k, v = (t.view(rows, longest, *t.shape[1:]) for t in qkv)
            out.append(self._attend(q, k, v, first_query=0).reshape(rows * longest, -1))
        return torch.cat(out).index_select(0, padding.to_packed)

    def _chunks(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """This rank's two chunks of each sequence (rlsys.trainer.model.share) against all keys before them."""
        group = parallel_state.get_context_parallel_group()
        ranks, rank = group.size(), group.rank()
        keys, values = (
            gather_from_sequence_parallel_region(t, group=group)[packed.place].split(packed.lengths)
            for t in (key, value)
        )
        queries = query.split([n // ranks for n in packed.lengths])
        out = []
        for q, k, v in zip(queries, keys, values, strict=True):
            size = len(q) // 2
            for part, chunk in zip(q.split(size), (rank, 2 * ranks - 1 - rank), strict=True):
                seen = (chunk + 1) * size
                attended = self._attend(part[None], k[None, :seen], v[None, :seen], first_query=chunk * size)
                out.append(attended.reshape(size, -1))
        return torch.cat(out)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, first_query: int) -> Tensor:
        """query `[rows, a, n, d]` against key, value `[rows, b, g, d]` -> `[rows, a, n, d]`; causal.

        The first query stands beside key `first_query`.
        """
        mask = None
        if first_query or self._before is not None or self.softmax_offset is not None:
            whole = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
            mask = whole.tril(first_query)
            if self._before is not None:
                mask = mask.triu(first_query - self._before)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        if self.softmax_offset is not None:
            return with_sinks(q, k, v, mask, self.softmax_scale, self.softmax_offset).transpose(1, 2)
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return attended.transpose(1, 2)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    """Attention in which every head has one more key, with a learnt logit and the value 0. `[rows, n, a, d]`.

    q `[rows, n, a, d]`, k and v `[rows, g, b, d]`, mask `[a, b]` bool, sinks `[n]`.
    """
    groups = k.shape[1]
    scores = q.unflatten(1, (groups, -1)) @ k[:, :, None].transpose(-1, -2) * scale  # [rows, g, n / g, a, b]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores.float(), sink], dim=-1).softmax(-1)[..., :-1].to(v.dtype)
    return (weights @ v[:, :, None]).flatten(1, 2)
