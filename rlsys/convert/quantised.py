"""Dequantisation of weights to bfloat16, with the results of transformers.

    mxfp4   gpt-oss, weights of experts: 32 numbers of 4 bits (E2M1) share an exponent (OCP Microscaling Formats 1.0)
    fp8     DeepSeek-V3, Kimi-K2, MiniMax-M2: the E4M3 numbers of a block of 128 x 128 share a float32 scale

Exported weights are not quantised again.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise an mxfp4 matrix.

    Args:
        blocks: `[rows, groups, 16]` uint8, two numbers per byte, of which the low half is the first.
        scales: `[rows, groups]` uint8, exponent + 127 of each group.

    Returns:
        `[rows, groups x 32]` bfloat16.
    """
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.bfloat16)
    numbers = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return torch.ldexp(numbers, (scales.int() - _BIAS)[..., None]).to(torch.bfloat16).flatten(1)


def from_fp8(weight: Tensor, scales: Tensor, block: int) -> Tensor:
    """Dequantise an E4M3 matrix.

    Args:
        weight: `[rows, columns]` float8.
        scales: `[ceil(rows / block), ceil(columns / block)]`.
        block: Number of rows and columns that share a scale.

    Returns:
        `[rows, columns]` bfloat16.
    """
    rows, columns = weight.shape
    expanded = scales.float().repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return (weight.float() * expanded).to(torch.bfloat16)
