"""Padding masks in routers with a bias of experts.

Symptom: RuntimeError: sizes do not match, because the mask `[tokens]` is multiplied with the map `[tokens, experts]`.
With equal numbers of tokens and experts, the counts are wrong instead.
Upstream: 0.16.1 - 0.19.2.
Why numbers stay equal: The product is the same, with the missing axis added to the mask.
Delete when: TopKRouter._apply_expert_bias adds that axis itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_patches.registry import Patch, target


def _edit(module: ModuleType) -> None:
    cls = module.TopKRouter
    upstream = target("expert_bias_padding", cls, "_apply_expert_bias", "local_tokens_per_expert +=")

    def apply(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        unpadded_map = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        upstream(self, unpadded_map)

    cls._apply_expert_bias = apply


PATCH = Patch(
    "expert_bias_padding", "megatron.core.transformer.moe.router", "always", "0.16.1 - 0.19.2",
    "RuntimeError: the padding mask's size does not match the routing map's", _edit,
)  # fmt: skip
