"""Linear layers with a frozen weight multiply all tokens in one product.

Symptom: A step with adapters takes many times as long as a step without them. In bfloat16 on a CPU, it runs out of
memory: each token has a separate product with a copy of the weight (56 MB per token with a vocabulary of 49,152).
torch.matmul folds `[tokens, 1, size]` into a matrix only if the strides of all axes match. In a transposed
`[1, tokens, size]`, the stride of the axis of length 1 is tokens * size. If the weight needs a gradient, torch always
folds. The gradient of the logits is such a tensor, and so is the embedding's output (rlsys/trainer/model/model.py).
Upstream: 0.16.1 - 0.19.2 (torch 2.13).
Why numbers stay equal: The sums are the same; their last bit may differ, because a product may add in another order.
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
