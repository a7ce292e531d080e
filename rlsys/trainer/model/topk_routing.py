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
"""(scores `[P, E]` from Megatron's router, k) -> ids of the selected experts `[P, k]` int64."""


class CustomRouting:
    """Object in place of Megatron's RouterReplay in a router, which selects the experts of every token."""

    def __init__(self, select: SelectExperts) -> None:
        self._select = select

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: object
    ) -> tuple[Tensor, Tensor]:
        """Return (scores of the selected experts, their ids), `[P, k]` each.

        Megatron's topk_routing_with_score_function calls it in place of `choose`.
        """
        expert_ids = self._select(scores, topk)
        return scores.gather(1, expert_ids), expert_ids


def set_topk_routing(router: TopKRouter, hf: HFConfig) -> None:
    """Set the model's selection method in a newly built router if it differs from Megatron's."""
    routing = hf.routing
    if routing.biased and routing.kind == "softmax":
        # Megatron supports biases of sigmoid scores only. This one has the same key in checkpoints.
        del router.expert_bias  # the attribute is None for softmax scores
        router.register_buffer("expert_bias", torch.zeros(1, hf.experts, dtype=torch.float32))
        router.router_replay = CustomRouting(partial(topk_biased, router))
    elif routing.groups > 1:
        # Megatron's value of a group is the sum of its k / top_groups best experts; the models use another number.
        groups, top_groups, worth = routing.groups, routing.top_groups, routing.group_worth
        router.router_replay = CustomRouting(
            partial(topk_in_groups, groups=groups, top_groups=top_groups, worth=worth)
        )


def topk_biased(router: TopKRouter, logits: Tensor, topk: int) -> Tensor:
    """Return the ids of the experts with the largest sum of probability and bias, `[P, k]` (Ernie-4.5).

    Args:
        router: The router, which owns the bias.
        logits: `[P, E]`.
        topk: k.
    """
    scores = logits.detach().float().softmax(-1) + router.expert_bias
    return scores.topk(topk, dim=1).indices


def topk_in_groups(scores: Tensor, topk: int, *, groups: int, top_groups: int, worth: int) -> Tensor:
    """Return the ids of the experts with the largest scores within the best groups, `[P, k]`.

    Args:
        scores: `[P, E]`.
        topk: k.
        groups: Number of groups, of E / groups consecutive experts each.
        top_groups: Number of groups to select from.
        worth: Number of best experts whose scores are summed to the value of a group (1 in DeepSeek-V2, section
            2.2.2; 2 in DeepSeek-V3, section 2.1.2).
    """
    grouped = scores.detach().unflatten(1, (groups, -1))
    best = grouped.topk(min(worth, grouped.shape[-1]), dim=-1).values.sum(-1).topk(top_groups, dim=1).indices
    excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(excluded[..., None], float("-inf")).flatten(1).topk(topk, dim=1).indices
