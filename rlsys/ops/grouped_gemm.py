"""Grouped GEMM of rows sorted by expert and their experts' weights: one forward, two backward.

The weights are a parameter per expert, as in checkpoints, optimizers and adapters. If they are at equal distances in
memory, as in Megatron's buffers, a view represents all of them; so does one of their `main_grad`, to which the
backward pass adds at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16
"""Alignment of rows in bytes that torch's grouped GEMM requires."""


def supported(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether torch multiplies `x` `[T, in]` with `weights`, each `[out, in]`, in one grouped GEMM.

    On GPUs its kernel requires bfloat16 and compute capability 9.0; otherwise it is a loop that waits for the device.
    """
    if len(weights) < 2 or not len(x) or not hasattr(torch, "_grouped_mm"):
        return False
    if x.is_cuda and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (9, 0)):
        return False
    return all(n * x.element_size() % _ALIGNED == 0 for n in weights[0].shape)


def strided_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view `[E, ...]` of equal tensors; None if they are not at equal distances in one storage."""
    first, last = tensors[0], tensors[-1]
    start = first.data_ptr()
    step = tensors[1].data_ptr() - start
    if (
        step < first.nbytes
        or step % _ALIGNED
        or not first.is_contiguous()
        or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr()
        or any(tensor.data_ptr() != start + i * step for i, tensor in enumerate(tensors))
    ):
        return None
    strides = (step // first.element_size(), *first.stride())
    return torch.as_strided(first.detach(), (len(tensors), *first.shape), strides)


def _stack_weights(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as `[E, ...]`: a view if possible."""
    view = strided_view(tensors)
    return torch.stack([tensor.detach() for tensor in tensors]) if view is None else view


class _GroupedLinear(torch.autograd.Function):
    """Grouped GEMM with autograd that saves no copy of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weights = weights
        return torch._grouped_mm(x, _stack_weights(weights).transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        weights, grad = ctx.weights, grads[0].contiguous()
        of_x = (
            torch._grouped_mm(grad, _stack_weights(weights), offs=ends) if ctx.needs_input_grad[0] else None
        )
        if not ctx.needs_input_grad[2]:
            return (of_x, None, *(None for _ in weights))
        of_weights = torch._grouped_mm(grad.t(), x, offs=ends)
        if not all(hasattr(weight, "grad_added_to_main_grad") for weight in weights):
            return of_x, None, *of_weights.unbind()
        _add([weight.main_grad for weight in weights], of_weights)
        for weight in weights:
            weight.grad_added_to_main_grad = True
        # Megatron's hooks run when a gradient arrives; they discard this one.
        return of_x, None, *(torch.empty_like(weight) for weight in weights)


def _add(main: Sequence[Tensor], gradients: Tensor) -> None:
    """Add `[E, ...]` to the accumulated gradients of each."""
    if (view := strided_view(main)) is not None:
        view.add_(gradients)
    else:
        torch._foreach_add_(list(main), [grad.to(main[0].dtype) for grad in gradients.unbind()])


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply each row with its expert's weight.

    Args:
        x: `[T, in]`, sorted by expert.
        ends: `[E]` int32 on the device of `x`: where each expert's rows end.
        weights: E parameters `[out, in]`. Their gradients go to `main_grad` where Megatron's DDP has made one.

    Returns:
        `[T, out]`.
    """
    out: Tensor = _GroupedLinear.apply(x, ends, *weights)
    return out
