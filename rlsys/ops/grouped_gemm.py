"""Linear layer of all experts as one grouped GEMM in the forward pass and two in the backward pass.

Each expert has its own weight parameter, as checkpoints, optimizers and adapters require. If the weights are at equal
distances in memory, as in Megatron's buffers, one view represents all of them. Another view represents their
`main_grad`, so that the backward pass adds all gradients in one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16
"""Alignment of rows in bytes that torch's grouped GEMM requires."""


def supported(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether torch can multiply `x` `[T, in]` with `weights`, `[out, in]` each, in one grouped GEMM.

    On a GPU, torch's kernel requires bfloat16 and compute capability 9.0. Otherwise torch runs a loop that waits for
    the device, which this function regards as unsupported.
    """
    if len(weights) < 2 or not len(x) or not hasattr(torch, "_grouped_mm"):
        return False
    if x.is_cuda and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (9, 0)):
        return False
    return all(n * x.element_size() % _ALIGNED == 0 for n in weights[0].shape)


def strided_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view `[E, ...]` of E tensors of one shape; None if they are not at equal distances in one storage."""
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
    """Return the tensors as `[E, ...]`: a view if possible, else a copy."""
    view = strided_view(tensors)
    return torch.stack([tensor.detach() for tensor in tensors]) if view is None else view


class _GroupedLinear(torch.autograd.Function):
    """Autograd function of grouped_linear, which saves no copy of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weights = weights
        return torch._grouped_mm(x, _stack_weights(weights).transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        weights, grad = ctx.weights, grads[0].contiguous()
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = torch._grouped_mm(grad, _stack_weights(weights), offs=ends)
        if not ctx.needs_input_grad[2]:
            return (x_gradient, None, *(None for _ in weights))
        weight_gradients = torch._grouped_mm(grad.t(), x, offs=ends)
        if not all(hasattr(weight, "grad_added_to_main_grad") for weight in weights):
            return x_gradient, None, *weight_gradients.unbind()
        _add([weight.main_grad for weight in weights], weight_gradients)
        for weight in weights:
            weight.grad_added_to_main_grad = True
        # Megatron's hooks run when autograd returns a gradient; they ignore its value.
        return x_gradient, None, *(torch.empty_like(weight) for weight in weights)


def _add(main_grads: Sequence[Tensor], gradients: Tensor) -> None:
    """Add the gradients `[E, ...]` to the `main_grad` of each expert."""
    if (view := strided_view(main_grads)) is not None:
        view.add_(gradients)
    else:
        torch._foreach_add_(list(main_grads), [grad.to(main_grads[0].dtype) for grad in gradients.unbind()])


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply each row with the weight of its expert.

    Args:
        x: `[T, in]`, sorted by expert.
        ends: `[E]` int32 on the device of `x`, index after the last row of each expert.
        weights: E parameters `[out, in]`. The backward pass adds their gradients to `main_grad` if Megatron's DDP has
            created it.

    Returns:
        `[T, out]`.
    """
    output: Tensor = _GroupedLinear.apply(x, ends, *weights)
    return output
