"""Split sizes of the experts' all-to-all on a CPU.

Symptom: TypeError: all_to_all_single() gets tensors as split sizes, because only CUDA tensors are converted to numpy.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: The integers are the same, in a numpy array instead of a tensor.
Delete when: `as_numpy` does not depend on the device.
"""

from __future__ import annotations

from types import ModuleType

import torch

from megatron_patches.registry import Patch, target


def _edit(module: ModuleType) -> None:
    upstream = target(
        "moe_splits", module, "maybe_move_tensor_to_cpu", "torch.is_tensor(tensor) and tensor.is_cuda"
    )

    def move(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.cpu().numpy()
        return upstream(tensor, as_numpy, record_stream)

    module.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]


PATCH = Patch(
    "moe_splits", "megatron.core.transformer.moe.moe_utils", "no-cuda", "0.16.1 - 0.19.2",
    "TypeError: all_to_all_single() gets tensors as split sizes", _edit,
)  # fmt: skip
