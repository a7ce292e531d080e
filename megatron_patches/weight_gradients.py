"""Accumulation of weight gradients without Apex.

Symptom: RuntimeError from ColumnParallelLinear of the head: gradient_accumulation_fusion needs Apex's
fused_weight_gradient_mlp_cuda. Transformer Engine's layers accumulate without it.
Upstream: 0.16.1.
Why numbers stay equal: The product is the one that autograd computes, and it is added where Megatron's hook adds it.
Delete when: Local layers accumulate weight gradients without Apex.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from megatron_patches.registry import Patch, target

_NAME = "weight_gradients"


class Products:
    """Functions in place of Apex's module fused_weight_gradient_mlp_cuda."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """Add the product of x `[T, in]` and grad `[T, out]` to main_grad `[out, in]`."""
        main_grad.add_(grad.t().matmul(x))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def _edit(module: ModuleType) -> None:
    if not module._grad_accum_fusion_available:
        call = "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32("
        target(_NAME, module, "LinearWithGradAccumulationAndAsyncCommunication", call)
        module.fused_weight_gradient_mlp_cuda = Products  # type: ignore[attr-defined]
        module._grad_accum_fusion_available = True  # type: ignore[attr-defined]


PATCH = Patch(
    _NAME, "megatron.core.tensor_parallel.layers", "always", "0.16.1",
    "RuntimeError: gradient_accumulation_fusion without Apex", _edit,
)  # fmt: skip
