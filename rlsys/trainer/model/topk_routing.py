"""Top-k expert selection for models whose method differs from Megatron's.

Shapes: P tokens of a router, E experts, k selected experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlsys.convert.config import HFConfig

SelectExperts = Callable[[Tensor, int], Tensor]
"""(scores `[P, E]` as Megatron ranks them, k) -> expert ids `[P, k]` int64."""


class CustomRouting:
    """Replacement of Megatron's RouterReplay in a router, which asks it for the experts of every token."""

    def __init__(self, select: SelectExperts) -> None:
        self._select = select

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: object
    ) -> tuple[Tensor, Tensor]:
        """Return (scores of the selected experts, their ids) `[P, k]`. Called by topk_routing_with_score_function."""
        expert_ids = self._select(scores, topk)
        return scores.gather(1, expert_ids), expert_ids


def set_topk_routing(router: TopKRouter, hf: HFConfig) -> None:
    """Set the model's selection method in a newly built router, with the bias that it requires."""
    routing = hf.routing
    if routing.biased and routing.kind == "softmax":
        # Megatron supports biases of sigmoid scores only. In its checkpoints this one has the same key.
        del router.expert_bias  # None if Megatron has no bias
        router.register_buffer("expert_bias", torch.zeros(1, hf.experts, dtype=torch.float32))
        router.router_replay = CustomRouting(partial(topk_biased, router))
    elif routing.groups > 1:
        # Megatron's group score, the sum of its k / top_groups best experts, equals the model's only by chance.
        groups, top_groups, worth = routing.groups, routing.top_groups, routing.group_worth
        router.router_replay = CustomRouting(
            partial(topk_in_groups, groups=groups, top_groups=top_groups, worth=worth)
        )


def topk_biased(router: TopKRouter, logits: Tensor, topk: int) -> Tensor:
    """Select the experts with the largest softmax over all experts + bias (Ernie-4.5)."""
    scores = logits.detach().float().softmax(-1) + router.expert_bias
    return scores.topk(topk, dim=1).indices


def topk_in_groups(scores: Tensor, topk: int, *, groups: int, top_groups: int, worth: int) -> Tensor:
    """Select the best experts within the `top_groups` best groups.

    The value of a group is the sum of its `worth` best experts (DeepSeek-V2, section 2.2.2, with one; DeepSeek-V3,
    section 2.1.2, with two).
    """
    grouped = scores.detach().unflatten(1, (groups, -1))
    best = grouped.topk(min(worth, grouped.shape[-1]), dim=-1).values.sum(-1).topk(top_groups, dim=1).indices
    excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(excluded[..., None], float("-inf")).flatten(1).topk(topk, dim=1).indices
