"""bench/gpu.py: what of it waits for a GPU, held to what a GPU's kernels ask for."""

from __future__ import annotations

import gpu_checks
import pytest
import torch
from torch import Tensor

from rlsys.weights.fp8 import dequantise, quantise


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """torch._scaled_mm of 1 x 128 by 128 x 128 blocks: refuses other shapes and strides of scales, as CUDA does
    (torch 2.14, aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    (tokens, columns), rows = a.shape, b.shape[1]
    assert b.stride() == (1, columns), "column-major"
    assert (scale_a.shape, scale_a.stride()) == ((tokens, columns // 128), (1, tokens))
    assert (scale_b.t().shape, scale_b.t().stride()) == ((rows // 128, columns // 128), (columns // 128, 1))
    by_column = scale_a.repeat_interleave(128, 1)
    return ((a.float() * by_column) @ dequantise(b.t(), scale_b.t()).t()).to(out_dtype)


def test_a_block_quantised_gemm_meets_the_constraints_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 512, generator=generator).bfloat16()
    weight = torch.randn(256, 512, generator=generator).bfloat16()
    exact = x.float() @ weight.float().t()
    output = gpu_checks.block_gemm(x, *quantise(weight)).float()
    assert (output - exact).norm() < 0.05 * exact.norm(), "eight bits"
