"""torch's RMSNorm under sequence parallelism.

Why numbers stay equal: the norm works on each token alone, so a rank's slice of the sequence needs nothing from
the others; only its weight's gradient must be summed over the tensor-parallel ranks, which megatron does for every
parameter marked `sequence_parallel`. Delete when WrappedTorchNorm marks its parameters itself.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

from megatron_patches.registry import Patch, expect


def _edit(module: ModuleType) -> None:
    expect(hasattr(module, "WrappedTorchNorm"), "norm_sequence_parallel", "WrappedTorchNorm is gone")
    upstream = module.WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        sequence_parallel = config.sequence_parallel
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = upstream(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = new


PATCH = Patch(
    "norm_sequence_parallel", "megatron.core.transformer.torch_norm", "no-te", "0.16.1 - 0.19.2",
    "AssertionError: sequence parallel not supported by torch LayerNorm", _edit,
)  # fmt: skip
