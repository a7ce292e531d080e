"""Advantage estimators: rewards `[S]` of complete groups -> one advantage per sample `[S]`.

Shapes: S samples; `group_ids` `[S]` says which samples share a prompt (any integers, any order).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def group_mean(values: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of `values` `[S]` within each sample's group, `[S]`."""
    _, inverse, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype).index_add_(0, inverse, values)
    return (sums / counts)[inverse]


def grpo(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """(R - mean_g) / (std_g + eps), std with n - 1 (GRPO, DeepSeekMath, section 4.1). 0 where all rewards agree."""
    centred = dr_grpo(rewards, group_ids)
    _, inverse, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    squares = torch.zeros(len(counts), dtype=rewards.dtype).index_add_(0, inverse, centred**2)
    std = (squares / (counts - 1).clamp(min=1)).sqrt()[inverse]
    return centred / (std + eps)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R - mean_g, no division by the deviation (Dr. GRPO, section 3)."""
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [S]")
    return rewards - group_mean(rewards, group_ids)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo}
