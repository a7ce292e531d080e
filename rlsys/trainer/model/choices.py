"""How tokens choose their experts, where megatron's own way is not the model's.

Shapes: P tokens of a router, E experts, k chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlsys.convert.config import HFConfig

Choose = Callable[[Tensor, int], Tensor]
"""Scores `[P, E]` as megatron ranks them, k -> the chosen `[P, k]` int64."""


class OwnChoice:
    """Takes the place of megatron's RouterReplay in a router, which asks it for every token's experts."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: object
    ) -> tuple[Tensor, Tensor]:
        """Scores `[P, E]` -> (scores of the chosen, chosen) `[P, k]`. Called by topk_routing_with_score_function."""
        chosen = self._choose(scores, topk)
        return scores.gather(1, chosen), chosen


def set_choice(router: TopKRouter, hf: HFConfig) -> None:
    """Give a newly built router the model's way to choose, and the bias that it needs for it."""
    routing = hf.routing
    if routing.biased and routing.kind == "softmax":
        # Megatron knows biases of sigmoid scores only. In its checkpoints this one has the same place as those.
        del router.expert_bias  # None, where megatron has no bias
        router.register_buffer("expert_bias", torch.zeros(1, hf.experts, dtype=torch.float32))
        router.router_replay = OwnChoice(partial(best_biased, router))
    elif routing.groups > 1:
        # Megatron's worth of a group is the sum of its k / top_groups best experts, which is the model's by chance.
        groups, top_groups, worth = routing.groups, routing.top_groups, routing.group_worth
        router.router_replay = OwnChoice(
            partial(best_in_groups, groups=groups, top_groups=top_groups, worth=worth)
        )


def best_biased(router: TopKRouter, logits: Tensor, topk: int) -> Tensor:
    """The best by softmax over all experts + bias (Ernie-4.5)."""
    scores = logits.detach().float().softmax(-1) + router.expert_bias
    return scores.topk(topk, dim=1).indices


def best_in_groups(scores: Tensor, topk: int, *, groups: int, top_groups: int, worth: int) -> Tensor:
    """The best of the `top_groups` best groups; a group is worth the sum of its `worth` best experts (DeepSeek-V2,
    section 2.2.2, with one; DeepSeek-V3, section 2.1.2, with two)."""
    grouped = scores.detach().unflatten(1, (groups, -1))
    best = grouped.topk(min(worth, grouped.shape[-1]), dim=-1).values.sum(-1).topk(top_groups, dim=1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1).topk(topk, dim=1).indices
