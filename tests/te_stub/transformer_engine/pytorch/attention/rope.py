"""Rotary embeddings of packed sequences, `tensor_format="thd"`, `[tokens, heads, head size]`."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Tensor | None = None,
    interleaved: bool = False, fused: bool = False, cu_seqlens: Tensor | None = None, cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """Rotate the first d elements of each head. `freqs`: `[longest, 1, 1, d]` float32, from position 0."""
    assert tensor_format == "thd" and fused and not interleaved
    assert start_positions is None and cp_size == 1
    assert cu_seqlens is not None and cu_seqlens.dtype == torch.int32 and freqs.dtype == torch.float32
    lengths = cu_seqlens.diff().tolist()
    assert sum(lengths) == len(t) and max(lengths) <= len(freqs)
    angles = torch.cat([freqs[:n, 0] for n in lengths])
    size = angles.shape[-1]
    rotary, rest = t[..., :size].float(), t[..., size:]
    first, second = rotary.chunk(2, dim=-1)
    rotated = rotary * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([rotated.to(t.dtype), rest], dim=-1)
