"""Recomputation of the activations of single modules without Transformer Engine.

Symptom: NameError: FP8GlobalStateManager.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: `fp8` only selects Transformer Engine's recompute context; without Transformer Engine there is
no FP8.
Delete when: CheckpointWithoutOutput checks whether FP8GlobalStateManager exists.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron_patches.registry import Patch, target


def _edit(module: ModuleType) -> None:
    cls = target("checkpoint_without_output", module, "CheckpointWithoutOutput", "self.fp8 = fp8 is not None")
    if hasattr(module, "FP8GlobalStateManager"):
        return
    upstream = cls.__init__

    def init(self: Any, fp8: Any = False, *args: Any, **kwargs: Any) -> None:
        upstream(self, None, *args, **kwargs)

    cls.__init__ = init


PATCH = Patch(
    "checkpoint_without_output", "megatron.core.tensor_parallel.random", "no-te", "0.16.1 - 0.19.2",
    "NameError: FP8GlobalStateManager when layernorm or moe_act is recomputed", _edit,
)  # fmt: skip
