"""Permutation of tokens by expert and its inverse. Row maps are token indices; in TE they are internal to kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    assert map_type == "mask"
    tokens = routing_map.T.nonzero()[:, 1]
    return inp[tokens], tokens


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    experts, tokens = routing_map.T.nonzero(as_tuple=True)
    assert num_out_tokens in (-1, len(tokens))
    return inp[tokens], probs[tokens, experts], tokens


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: torch.Size | None = None,
    map_type: str = "mask", probs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert merging_probs is None and probs is None and restore_shape is not None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    sort = moe_sort_chunks_by_index
    return sort(inp, split_sizes, sorted_index), sort(probs, split_sizes, sorted_index)
