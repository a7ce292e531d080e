"""Token dispatchers release the router's probabilities after the layer's output is computed.

Symptom: Memory that stays allocated after a step. With recomputed layers, the dispatcher's last probabilities belong
to a graph of the backward pass, whose leaves are the layer's input and its gradient. They take 1.4 GB per rank for
Qwen3-30B-A3B on 16 GPUs, and 1.8 GB for GLM-4.5-Air on 64 GPUs, while engines need this memory.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: No code reads the probabilities between a layer's output and its next input, which sets new
ones.
Delete when: The dispatchers release the probabilities in combine_postprocess.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_patches.registry import Patch, target

_NAME = "dispatcher_memory"
_PROBABILITIES = {"MoEAlltoAllTokenDispatcher": "probs", "MoEAllGatherTokenDispatcher": "local_probs"}


def _edit(module: ModuleType) -> None:
    for owner, attribute in _PROBABILITIES.items():
        cls = target(_NAME, module, owner, f"self.{attribute} = ")
        _release_after(cls, target(_NAME, cls, "combine_postprocess"), attribute)


def _release_after(cls: Any, upstream: Any, attribute: str) -> None:
    def combine_and_release(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = upstream(self, *args, **kwargs)
        setattr(self, attribute, None)
        return output

    cls.combine_postprocess = combine_and_release


PATCH = Patch(
    "dispatcher_memory", "megatron.core.transformer.moe.token_dispatcher", "always", "0.16.1 - 0.19.2",
    "every layer's input and its gradient stay in memory after a step with recompute", _edit,
)  # fmt: skip
