"""A linear layer with a frozen weight multiplies all tokens in one product.

Symptom: a step with adapters takes many times as long as one of the whole model, and in bfloat16 on a CPU it runs out
of memory (56 MB a token with a vocabulary of 49,152): one product for each token, with a copy of the weight each.
torch.matmul folds `[tokens, 1, size]` into a matrix only if the strides of all axes fit each other, and a
transposed `[1, tokens, size]` has tokens * size for the axis of length 1. Where the weight needs a gradient it always
folds. That concerns the gradient of the head, and the input of the first layer.
Upstream: 0.16.1 - 0.19.2 (torch 2.13).
Why numbers stay equal: the same sums; the order in which a product adds may differ in the last bit.
Delete when: torch.matmul looks at no stride of an axis of length 1.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_patches.registry import Patch, target

_NAME = "frozen_weight_products"


def with_plain_strides(x: Tensor) -> Tensor:
    """The same values `[..., size]`, as rows one after the other: a view, where they lie so."""
    return x.flatten(0, -2).view(x.shape)


def _edit(module: ModuleType) -> None:
    linear = target(
        _NAME, module, "LinearWithFrozenWeight", "output = torch.matmul(input, weight.t())",
        "grad_input = grad_output.matmul(weight)",
    )  # fmt: skip
    upstream_forward, upstream_backward = linear.forward, linear.backward

    def forward(ctx: Any, x: Tensor, *args: Any) -> Any:
        return upstream_forward(ctx, with_plain_strides(x), *args)

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return upstream_backward(ctx, with_plain_strides(gradient))

    linear.forward, linear.backward = staticmethod(forward), staticmethod(backward)


PATCH = Patch(
    _NAME, "megatron.core.tensor_parallel.layers", "always", "0.16.1 - 0.19.2",
    "a frozen weight is multiplied token by token; adapters in bfloat16 run out of memory", _edit,
)  # fmt: skip
