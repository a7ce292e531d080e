"""The gradient norm without Transformer Engine or Apex, in one pass.

Symptom: on a GPU, a kernel and a wait of the host for each parameter (2,110 a step of 4 layers of 128 experts).
Upstream: 0.16.1.
Why numbers stay equal: the result is the norm of the gradients' norms, as upstream.
Delete when: upstream's replacement for amp_C.multi_tensor_l2norm does not read values of tensors on the host.
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
    """Replace amp_C.multi_tensor_l2norm. Returns `[1]` float32 on the tensors' device."""
    norms = torch._foreach_norm([tensor for tensors in tensor_lists for tensor in tensors])
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])).reshape(1), None


def _edit(module: ModuleType) -> None:
    target(_NAME, module, "local_multi_tensor_l2_norm", "torch.norm(torch.tensor(l2))")
    module.local_multi_tensor_l2_norm = l2_norm  # type: ignore[attr-defined]


PATCH = Patch(
    _NAME, "megatron.core.utils", "no-te", "0.16.1",
    "a wait of the host for every parameter's gradient norm", _edit,
)  # fmt: skip
