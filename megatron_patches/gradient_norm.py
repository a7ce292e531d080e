"""Gradient norm in one pass, without Transformer Engine or Apex.

Symptom: On a GPU, each parameter needs a kernel, for which the host waits (2,110 times per step for 4 layers with 128
experts).
Upstream: 0.16.1.
Why numbers stay equal: The result is the norm of the gradients' norms, as upstream.
Delete when: Upstream's replacement for amp_C.multi_tensor_l2norm does not read values of tensors on the host.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megatron_patches.registry import Patch, target

_NAME = "gradient_norm"


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool, *args: object
) -> tuple[Tensor, None]:
    """Return the norm of all tensors, `[1]` float32 on their device; replaces amp_C.multi_tensor_l2norm."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])).reshape(1), None


def _edit(module: ModuleType) -> None:
    target(_NAME, module, "local_multi_tensor_l2_norm", "torch.norm(torch.tensor(l2))")
    module.local_multi_tensor_l2_norm = l2_norm  # type: ignore[attr-defined]


PATCH = Patch(
    _NAME, "megatron.core.utils", "no-te", "0.16.1",
    "a wait of the host for every parameter's gradient norm", _edit,
)  # fmt: skip
