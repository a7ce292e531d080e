"""torch's RMSNorm with sequence parallelism.

Symptom: AssertionError: sequence parallel not supported by torch LayerNorm.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: The norm of a token depends only on this token, so that a rank needs only its part of the
sequence. The gradient of the weight must be summed over tensor-parallel ranks, as megatron does for every parameter
that is marked `sequence_parallel`.
Delete when: WrappedTorchNorm marks its parameters itself.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

from megatron_patches.registry import Patch, target

_NAME = "norm_sequence_parallel"


def _edit(module: ModuleType) -> None:
    wrapped = target(_NAME, module, "WrappedTorchNorm", "sequence parallel not supported by torch LayerNorm")
    upstream = wrapped.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = upstream(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapped.__new__ = new


PATCH = Patch(
    _NAME, "megatron.core.transformer.torch_norm", "no-te", "0.16.1 - 0.19.2",
    "AssertionError: sequence parallel not supported by torch LayerNorm", _edit,
)  # fmt: skip
