"""A token dispatcher forgets the router's probabilities once its layer's output is made.

Symptom: memory that outlives the step. With layers that are computed again the dispatcher's last probabilities belong
to a graph of the backward pass; the graph's leaves are the layer's input and its gradient. 1.4 GB a rank for
Qwen3-30B-A3B on 16 GPUs, 1.8 GB for GLM-4.5-Air on 64, while the engines want that memory.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: nothing reads them between a layer's output and its next input, which brings new ones.
Delete when: the dispatchers let go of them in combine_postprocess.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_patches.registry import Patch, target

_NAME = "dispatcher_forgets"
_KEPT = {"MoEAlltoAllTokenDispatcher": "probs", "MoEAllGatherTokenDispatcher": "local_probs"}


def _edit(module: ModuleType) -> None:
    for owner, kept in _KEPT.items():
        cls = target(_NAME, module, owner, f"self.{kept} = ")
        _forget_after(cls, target(_NAME, cls, "combine_postprocess"), kept)


def _forget_after(cls: Any, upstream: Any, kept: str) -> None:
    def combine_and_forget(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = upstream(self, *args, **kwargs)
        setattr(self, kept, None)
        return output

    cls.combine_postprocess = combine_and_forget


PATCH = Patch(
    "dispatcher_forgets", "megatron.core.transformer.moe.token_dispatcher", "always", "0.16.1 - 0.19.2",
    "every layer's input and its gradient stay in memory after a step with recompute", _edit,
)  # fmt: skip
