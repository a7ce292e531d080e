"""Experts with biases add the second bias out of place.

Symptom: RuntimeError: Output 0 of _ReduceFromModelParallelRegion is a view and is being modified inplace, in the
first forward pass of a training step.
Upstream: 0.16.1.
Why numbers stay equal: The sum is the same, in a new tensor.
Delete when: MLP.forward does not add the bias in place.
"""

from __future__ import annotations

import inspect
import textwrap
from types import ModuleType
from typing import Any

from megatron_patches.registry import Patch, target

_NAME = "moe_expert_bias"
_IN_PLACE = "output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)"


def _edit(module: ModuleType) -> None:
    upstream = target(_NAME, module.MLP, "forward", _IN_PLACE)
    source = textwrap.dedent(inspect.getsource(upstream))
    edited = source.replace(_IN_PLACE, _IN_PLACE.replace("output +=", "output = output +"))
    namespace: dict[str, Any] = {}
    exec(compile(edited, str(module.__file__), "exec"), module.__dict__, namespace)
    module.MLP.forward = namespace["forward"]


PATCH = Patch(
    _NAME, "megatron.core.transformer.mlp", "always", "0.16.1",
    "RuntimeError: a view is being modified inplace, in a training step of experts with biases", _edit,
)  # fmt: skip
