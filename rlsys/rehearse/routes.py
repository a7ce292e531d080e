"""Which experts tokens take in a rehearsal: evenly, or some more than others."""

from __future__ import annotations

import torch
from torch import Tensor


def routing_map(tokens: int, experts: int, topk: int, skew: float = 1.0) -> Tensor:
    """`[tokens, experts]` bool. Token t takes experts t k ... t k + k - 1, modulo their number.

    `skew` > 1: so many times as many tokens as its even share take the first `topk` experts, which are neighbours
    and so mostly on one rank.
    """
    chosen = (torch.arange(tokens)[:, None] * topk + torch.arange(topk)) % experts
    hot = int(tokens * min(1.0, (skew - 1) * topk / experts))
    chosen[:hot] = torch.arange(topk)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
