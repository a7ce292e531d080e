"""Synthetic expert routes of a rehearsal, balanced or skewed."""

from __future__ import annotations

import torch
from torch import Tensor


def routing_map(tokens: int, experts: int, topk: int, skew: float = 1.0) -> Tensor:
    """Return which experts each token uses, `[tokens, experts]` bool.

    Token t uses the k experts t k ... t k + k - 1, modulo the number of experts.

    Args:
        tokens: Number of tokens.
        experts: Number of experts.
        topk: k, the number of experts per token.
        skew: If above 1, the first k experts, most of which are on one rank, get about `skew` times the mean number
            of tokens per expert.
    """
    expert_ids = (torch.arange(tokens)[:, None] * topk + torch.arange(topk)) % experts
    skewed_tokens = int(tokens * min(1.0, (skew - 1) * topk / experts))
    expert_ids[:skewed_tokens] = torch.arange(topk)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, expert_ids, True)
