"""Dequantisation of the weights of a folder to bfloat16, as transformers does it.

mxfp4   gpt-oss: 32 numbers of 4 bits (E2M1) share an exponent (OCP Microscaling Formats 1.0); experts' weights only
fp8     DeepSeek-V3, Kimi-K2, MiniMax-M2: E4M3, a block of 128 x 128 shares a float32 scale

Training uses the dequantised weights, which are not quantised again.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise mxfp4: `[rows, groups x 32]` bfloat16.

    Args:
        blocks: `[rows, groups, 16]` uint8, two numbers a byte, the low half first.
        scales: `[rows, groups]` uint8, the exponents + 127.
    """
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.bfloat16)
    numbers = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return torch.ldexp(numbers, (scales.int() - _BIAS)[..., None]).to(torch.bfloat16).flatten(1)


def from_fp8(weight: Tensor, scales: Tensor, block: int) -> Tensor:
    """Dequantise E4M3 `[rows, columns]` by scales `[rows / block, columns / block]`, rounded up, to bfloat16."""
    rows, columns = weight.shape
    expanded = scales.float().repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return (weight.float() * expanded).to(torch.bfloat16)
