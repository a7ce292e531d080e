"""A linear layer with a frozen weight multiplies all tokens in one product.

Symptom: a step with adapters takes many times as long as one of the whole model, and in bfloat16 on a CPU it runs out
of memory (56 MB a token with a vocabulary of 49,152): one product for each token, with a copy of the weight each.
torch.matmul folds `[tokens, 1, size]` into a matrix only if the strides of all axes fit each other, and a
transposed `[1, tokens, size]` has tokens * size for the axis of length 1. Where the weight needs a gradient it always
folds. The gradient of the logits is such a tensor, and so is the embedding's output (rlsys/trainer/model/model.py).
Upstream: 0.16.1 - 0.19.2 (torch 2.13).
Why numbers stay equal: the same sums; the order in which a product adds may differ in the last bit.
Delete when: torch.matmul ignores the stride of an axis of length 1.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_patches.registry import Patch, target

_NAME = "frozen_weight_products"


def _edit(module: ModuleType) -> None:
    linear = target(_NAME, module, "LinearWithFrozenWeight", "grad_input = grad_output.matmul(weight)")
    upstream = linear.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return upstream(ctx, gradient.flatten(0, -2).view(gradient.shape))

    linear.backward = staticmethod(backward)


PATCH = Patch(
    _NAME, "megatron.core.tensor_parallel.layers", "always", "0.16.1 - 0.19.2",
    "a frozen weight is multiplied token by token; adapters in bfloat16 run out of memory", _edit,
)  # fmt: skip
