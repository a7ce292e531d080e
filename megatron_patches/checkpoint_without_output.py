"""Activation recompute of single modules without Transformer Engine.

Why numbers stay equal: `fp8` only chooses TE's recompute context; without TE there is no fp8. Delete when
CheckpointWithoutOutput guards FP8GlobalStateManager itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron_patches.registry import Patch, expect


def _edit(module: ModuleType) -> None:
    expect(hasattr(module, "CheckpointWithoutOutput"), "checkpoint_without_output", "the class is gone")
    if hasattr(module, "FP8GlobalStateManager"):
        return
    upstream = module.CheckpointWithoutOutput.__init__

    def init(self: Any, fp8: Any = False) -> None:
        upstream(self, None)  # its test is `fp8 is not None`

    module.CheckpointWithoutOutput.__init__ = init


PATCH = Patch(
    "checkpoint_without_output", "megatron.core.tensor_parallel.random", "no-te", "0.16.1",
    "NameError: FP8GlobalStateManager when layernorm or moe_act is recomputed", _edit,
)  # fmt: skip
