"""Load of checkpoints with offloaded optimizer state.

Symptoms:
1. No such checkpoint can be loaded: UnpicklingError, "Unsupported global: torch.optim.adamw.AdamW".
   HybridDeviceOptimizer has the classes of its two halves among its defaults. They are therefore in each of its
   parameter groups, which torch loads with weights_only.
2. After a load, the bias correction of the half on the GPU is silently wrong. FusedAdam counts steps in its groups,
   which get the loaded number again in each step.
Upstream: 0.16.1.
Why numbers stay equal: An optimizer takes its classes from its own defaults, not from its groups. After a load, each
half counts its own steps (tests/integration/test_offload.py).
Delete when: Upstream excludes the classes from the groups, and does not copy the number of steps.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megatron_patches.registry import Patch, target

_NAME = "offload_resume"
_CLASSES = ("cpu_optimizer_cls", "gpu_optimizer_cls")


def _edit(module: ModuleType) -> None:
    cls = target(_NAME, module, "HybridDeviceOptimizer", *(f'"{name}": {name},' for name in _CLASSES))
    state_dict = target(_NAME, cls, "state_dict")
    sync = target(
        _NAME, cls, "_sync_hdo_param_groups_to_sub_optimizers", "new_group.update(update_group_attrs)"
    )

    def state_without_classes(self: Any) -> dict[str, Any]:
        state: dict[str, Any] = state_dict(self)
        for group in state["param_groups"]:
            for name in _CLASSES:
                group.pop(name, None)  # a loaded group has no classes
        return state

    def sync_all_but_steps(self: Any) -> None:
        steps_before = [[group.get("step") for group in half.param_groups] for half in self.sub_optimizers]
        sync(self)
        for half, steps in zip(self.sub_optimizers, steps_before, strict=True):
            for group, step in zip(half.param_groups, steps, strict=True):
                if step is not None:
                    group["step"] = step

    cls.state_dict = state_without_classes
    cls._sync_hdo_param_groups_to_sub_optimizers = sync_all_but_steps


PATCH = Patch(
    _NAME, "megatron.core.optimizer.cpu_offloading.hybrid_optimizer", "always", "0.16.1",
    "a checkpoint with offloaded optimizer state cannot be loaded, or Adam's steps are counted wrong after it", _edit,
)  # fmt: skip
