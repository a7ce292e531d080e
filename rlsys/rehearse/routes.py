"""Synthetic expert routes of a rehearsal: balanced, or skewed."""

from __future__ import annotations

import torch
from torch import Tensor


def routing_map(tokens: int, experts: int, topk: int, skew: float = 1.0) -> Tensor:
    """Return a routing map `[tokens, experts]` bool: token t uses experts t k ... t k + k - 1, modulo their number.

    With `skew` > 1 the first `topk` experts, which are mostly on one rank, get `skew` times their even share of
    tokens.
    """
    expert_ids = (torch.arange(tokens)[:, None] * topk + torch.arange(topk)) % experts
    hot = int(tokens * min(1.0, (skew - 1) * topk / experts))
    expert_ids[:hot] = torch.arange(topk)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, expert_ids, True)
