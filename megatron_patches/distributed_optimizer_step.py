"""Checkpoints of DistributedOptimizer with torch's Adam, which counts steps for each parameter.

Symptom: KeyError 'step' during a load. An assertion if state_dict() runs before the first step. After a load, all
parameters share one step tensor, so that Adam counts a step once per parameter and its bias correction is silently
wrong.
Upstream: 0.16.1 - 0.19.2 without Apex and Transformer Engine.
Why numbers stay equal: Each parameter gets the saved step in a separate tensor. A resumed run has the same numbers as
a run without interruption (tests/integration/test_trainer.py).
Delete when: Upstream gives each parameter a separate step tensor.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from megatron_patches.registry import Patch, target

_NAME = "distributed_optimizer_step"


def _edit(module: ModuleType) -> None:
    cls = target(_NAME, module, "DistributedOptimizer")
    set_states = target(_NAME, cls, "_set_main_param_and_optimizer_states", "(self, model_param, tensors)")
    load = target(_NAME, cls, "load_state_dict", "(self, state_dict)", 's["step"] = step')
    sharded = target(_NAME, cls, "sharded_state_dict", "is_loading: bool = False")

    def set_states_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        if "step" not in tensors:
            present = self._get_main_param_and_optimizer_states(model_param)
            if "step" in present:
                tensors = {**tensors, "step": present["step"]}
        return set_states(self, model_param, tensors)

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    def sharded_with_steps(
        self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        create_states(self.optimizer)
        return sharded(self, model_state, is_loading, *args, **kwargs)

    cls._set_main_param_and_optimizer_states = set_states_with_step
    cls.load_state_dict = load_with_own_steps
    cls.sharded_state_dict = sharded_with_steps


def create_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states that Adam would create in its first step.

    A load needs tensors to fill, and a save needs the number of steps.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                optimizer.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }


PATCH = Patch(
    _NAME, "megatron.core.optimizer.distrib_optimizer", "no-te", "0.16.1 - 0.19.2",
    "KeyError 'step' at load, or one step tensor shared by all parameters after it", _edit,
)  # fmt: skip
