"""Core attention over packed sequences, without Transformer Engine or for micro-batches with shared tokens.

A token attends only to its own sequence. A sequence with shared tokens (rlsys/trainer/prefixes.py) attends to the
keys of the sequence that computes them. Under context parallelism, every rank gathers all keys and values.

Shapes: T packed tokens of this rank, P padded tokens, n heads, g key-value groups, d head size, c context-parallel
ranks. query `[T, n, d]`, key and value `[T, g, d]` (Megatron's "thd" format), output `[T, n d]`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Rectangle(NamedTuple):
    """A batch of `rows` sequences, each of `prefix` shared tokens and own tokens that are padded to `longest`."""

    rows: int
    longest: int
    prefix: int


@dataclass(frozen=True)
class Padding:
    """Index maps between packed tokens and rectangles of padded sequences of similar length.

    Attributes:
        to_padded: `[P]`, packed token at each padded position. Padding repeats the first token of its sequence.
        to_packed: `[T]`, padded position of each packed token.
        rectangles: The rectangles, in the order of the padded positions.
        to_keys: Packed token of each key: for each sequence, its shared tokens, then its padded own tokens. None: no
            tokens are shared, and `to_padded` applies to keys, too.
    """

    to_padded: Tensor
    to_packed: Tensor
    rectangles: list[Rectangle]
    to_keys: Tensor | None = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, prefixes: Sequence[Tensor] = ()) -> Padding:
        """Group sequences into rectangles and build the maps.

        The lengths of a rectangle's sequences are between 3/4 of the first sequence's length and that length. If
        tokens are shared, the sequences of a rectangle share the same number of tokens.

        Args:
            lengths: Number of own tokens of each sequence.
            device: Device of the maps.
            prefixes: Packed tokens that each sequence shares; empty: no tokens are shared.
        """
        prefix_lengths = [len(prefix) for prefix in prefixes] or [0] * len(lengths)
        order = list(range(len(lengths)))
        if any(prefix_lengths):
            order.sort(key=lambda i: (prefix_lengths[i], -lengths[i]))
        rectangles: list[Rectangle] = []
        for n, k in ((lengths[i], prefix_lengths[i]) for i in order):
            last = rectangles[-1] if rectangles else None
            if last is not None and k == last.prefix and 3 * last.longest <= 4 * n <= 4 * last.longest:
                rectangles[-1] = last._replace(rows=last.rows + 1)
            else:
                rectangles.append(Rectangle(1, n, k))
        widths = torch.tensor([r.longest for r in rectangles for _ in range(r.rows)])
        size = torch.tensor([lengths[i] for i in order])
        start = (torch.tensor(lengths).cumsum(0) - torch.tensor(lengths))[order]
        padded_start = widths.cumsum(0) - widths
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), widths)
        position = torch.arange(int(widths.sum())) - padded_start[sequence]
        real = position < size[sequence]
        to_padded = start[sequence] + torch.where(real, position, 0)
        to_packed = torch.empty(int(size.sum()), dtype=torch.int64)
        to_packed[to_padded[real]] = torch.arange(len(position))[real]
        to_keys = None
        if any(prefix_lengths):
            own_keys = to_padded.split(widths.tolist())
            to_keys = torch.cat(
                [part for i, keys in zip(order, own_keys, strict=True) for part in (prefixes[i], keys)]
            )
            to_keys = to_keys.to(device)
        return cls(to_padded.to(device), to_packed.to(device), rectangles, to_keys)


class LongestLength(int):
    """Length of the longest sequence, which Megatron passes to the rotary embedding (see `rotate_by_position`)."""

    positions: Tensor
    """[T], position of each token within its sequence."""

    @classmethod
    def of(cls, positions: Tensor, longest: int) -> LongestLength:
        length = cls(longest)
        length.positions = positions
        return length


def _select_positions(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """Replace the angles of all positions, `[longest, 1, 1, d]`, by those of the tokens, `[T, 1, 1, d]`.

    With yarn, the output is a tuple of the angles and a factor.
    """
    if not isinstance(inputs[0], LongestLength):
        return output
    if isinstance(output, tuple):
        return output[0][inputs[0].positions], *output[1:]
    return output[inputs[0].positions]


def rotate_by_position(model: torch.nn.Module) -> None:
    """Make the model's rotary embeddings return the angles of each token if PackedSequences has positions.

    Megatron loops over the sequences and starts each at position 0, but the own tokens of a sequence with shared
    tokens start at a later position.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.register_forward_hook(_select_positions)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with the additional fields of PackedAttention.

    Attributes:
        lengths: Number of own tokens of each whole sequence, of which this rank may have only a part.
        gathered_index: `[c T]`, under context parallelism the index of each token among the gathered tokens of all
            ranks; None: this rank has all tokens.
        prefixes: Packed tokens that each sequence shares; empty: no tokens are shared.
    """

    lengths: list[int] = field(default_factory=list)
    gathered_index: Tensor | None = None
    prefixes: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        lengths: list[int],
        device: torch.device,
        gathered_index: Tensor | None = None,
        prefixes: list[Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> PackedSequences:
        """Describe packed sequences.

        Args:
            lengths: See the attributes.
            device: Device of the tensors.
            gathered_index: See the attributes.
            prefixes: See the attributes; None: no tokens are shared.
            positions: `[T]`, position of each token within its sequence, for a model with `rotate_by_position`.
        """
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        longest = max(lengths)
        whole_seqlens = None
        if prefixes:
            longest = max(n + len(k) for n, k in zip(lengths, prefixes, strict=True))
        if positions is not None:  # Megatron's rotary embedding gets all tokens as one sequence
            longest = LongestLength.of(positions, longest)
            whole_seqlens = cu_seqlens[[0, -1]]
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=whole_seqlens,
            cu_seqlens_kv_padded=whole_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            gathered_index=None if gathered_index is None else gathered_index.to(device),
            prefixes=prefixes or [],
        )

    @cached_property
    def padding(self) -> Padding:
        """Index maps, computed once for all layers and only if a layer uses them."""
        return Padding.of(self.lengths, self.cu_seqlens_q.device, self.prefixes)


class PackedAttention(DotProductAttention):
    """Causal attention, with one call of a torch kernel for each rectangle of sequences.

    Padding follows the real keys of a sequence, so that the causal mask hides it. Megatron's fields `window_size`,
    `window_attn_skip_freq` and `softmax_type` select windows and sinks (gpt-oss).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Initialise. The head sizes, which latent attention passes, are ignored: the tensors define them."""
        local_config = copy.copy(config)
        # Megatron's class supports no other size. Its parameters do not depend on the size.
        local_config.context_parallel_size = 1
        super().__init__(local_config, *args, **kwargs)
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        )
        self._window = config.window_size[0] if windowed else None
        """Number of keys before a query's own key that the query attends to; None: all."""

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
        """Compute the attention of packed sequences; see the module for the shapes.

        Arguments of Megatron's class besides `packed_seq_params` and the tensors are ignored.
        """
        if packed_seq_params is None:
            raise ValueError(
                f"packed_seq_params = {packed_seq_params!r:.80}: expected PackedSequences (PackedSequences.of)"
            )
        if packed_seq_params.gathered_index is not None:
            return self._chunks(query, key, value, packed_seq_params)
        padding = packed_seq_params.padding
        queries = self._rectangles(query, padding, padding.to_padded, with_shared=False)
        to_keys = padding.to_padded if padding.to_keys is None else padding.to_keys
        # Padding adds exactly 0 to a gradient: no real query attends to it, and its own output is dropped.
        keys, values = (self._rectangles(t, padding, to_keys, with_shared=True) for t in (key, value))
        outputs = []
        for rectangle, q, k, v in zip(padding.rectangles, queries, keys, values, strict=True):
            attended = self._attend(q, k, v, first_query=rectangle.prefix)
            outputs.append(attended.reshape(rectangle.rows * rectangle.longest, -1))
        return torch.cat(outputs).index_select(0, padding.to_packed)

    @staticmethod
    def _rectangles(tokens: Tensor, padding: Padding, index: Tensor, *, with_shared: bool) -> list[Tensor]:
        """Select the tokens `[T, n, d]` of each rectangle by `index`, as `[rows, longest, n, d]`.

        `with_shared`: the index includes the shared tokens, and the shape is `[rows, prefix + longest, n, d]`.
        """
        widths = [r.longest + with_shared * r.prefix for r in padding.rectangles]
        sizes = [r.rows * width for r, width in zip(padding.rectangles, widths, strict=True)]
        parts = tokens.index_select(0, index).split(sizes)
        return [part.unflatten(0, (-1, width)) for part, width in zip(parts, widths, strict=True)]

    def _chunks(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Compute the attention of this rank's two chunks of each sequence (context_parallel.py), `[T, n d]`."""
        group = parallel_state.get_context_parallel_group()
        ranks, rank = group.size(), group.rank()
        keys, values = (
            gather_from_sequence_parallel_region(t, group=group)[packed.gathered_index].split(packed.lengths)
            for t in (key, value)
        )
        queries = query.split([n // ranks for n in packed.lengths])
        outputs = []
        for q, k, v in zip(queries, keys, values, strict=True):
            size = len(q) // 2
            for part, chunk in zip(q.split(size), (rank, 2 * ranks - 1 - rank), strict=True):
                visible = (chunk + 1) * size
                attended = self._attend(
                    part[None], k[None, :visible], v[None, :visible], first_query=chunk * size
                )
                outputs.append(attended.reshape(size, -1))
        return torch.cat(outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, first_query: int) -> Tensor:
        """Compute causal attention of query `[rows, a, n, d]`, key and value `[rows, b, g, d]`.

        Query i attends to the keys up to `first_query` + i. Returns `[rows, a, n, d]`.
        """
        plain = self._window is None and self.softmax_offset is None
        if plain and 0 < first_query < query.shape[1] == key.shape[1] - first_query:
            # Kernels skip the upper triangle of a square, but no part of a masked rectangle. A square with additional
            # queries, whose output is dropped, is therefore less work.
            square = torch.cat([query.new_zeros(query.shape[0], first_query, *query.shape[2:]), query], dim=1)
            return self._attend(square, key, value, first_query=0)[:, first_query:]
        mask = None
        if first_query or not plain:
            full_mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
            mask = full_mask.tril(first_query)
            if self._window is not None:
                mask = mask.triu(first_query - self._window)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        if self.softmax_offset is not None:
            return with_sinks(q, k, v, mask, self.softmax_scale, self.softmax_offset).transpose(1, 2)
        if mask is not None and q.shape[1] != k.shape[1]:
            # On a GPU, torch's only kernel for masks with grouped heads would store all scores.
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return without_sinks(q, k, v, mask, self.softmax_scale).transpose(1, 2)


def without_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention with a torch kernel; `mask` None: causal. Shapes as in `with_sinks`."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


@cache
def engine_attention() -> type[Any]:
    """Return the core attention for Transformer Engine's layers, as a subclass of Transformer Engine's class.

    It uses PackedAttention for micro-batches with shared tokens, because in Transformer Engine's kernels a sequence
    cannot attend to the keys of another one. Without sinks, neither class has parameters, so that checkpoints are
    equal.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class EngineAttention(TEDotProductAttention):
        """Transformer Engine's core attention, and PackedAttention for micro-batches with shared tokens."""

        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self.packed_attention = PackedAttention(config, *args, **kwargs)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            *args: Any,
            packed_seq_params: PackedSequences,
            **kwargs: Any,
        ) -> Tensor:
            output: Tensor
            if packed_seq_params.prefixes:
                output = self.packed_attention(
                    query, key, value, attention_mask, packed_seq_params=packed_seq_params
                )
            else:
                output = super().forward(
                    query, key, value, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
                )
            return output

    return EngineAttention


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    """Compute attention in which each head has an additional key with a learnt logit and the value 0.

    Args:
        q: `[rows, n, a, d]`.
        k: `[rows, g, b, d]`.
        v: `[rows, g, b, d]`.
        mask: `[a, b]` bool, True where a query attends to a key; None: all.
        scale: Factor of the scores.
        sinks: `[n]`, logit of each head's additional key.

    Returns:
        `[rows, n, a, d]`.
    """
    groups = k.shape[1]
    scores = q.unflatten(1, (groups, -1)) @ k[:, :, None].transpose(-1, -2) * scale  # [rows, g, n / g, a, b]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores.float(), sink], dim=-1).softmax(-1)[..., :-1].to(v.dtype)
    return (weights @ v[:, :, None]).flatten(1, 2)
