"""Policy losses on packed tokens. Pure functions: tensors in, the sum of the token losses and sums of metrics out.

Shapes: T tokens of several samples behind each other. `logp` carries the gradient; `anchor` is what the clipped
ratio is taken against (`mu` of the engine, or `old` of the trainer); `advantages`, `mask` and `weight` are `[T]`.
A sum, never a mean: the caller divides by a token count fixed over all ranks before anything was masked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    logp: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum over tokens of weight * min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logp - anchor).

    PPO (Schulman 2017, eq. 7) with DAPO's split clip widths (section 3.1). Returns the loss sum (scalar) and
    {"clipped": number of tokens whose gradient the clip removed}. Masked tokens contribute exactly 0, also when
    their log-probs are not finite.
    """
    for name, value in (("anchor", anchor), ("advantages", advantages), ("mask", mask)):
        if value.shape != logp.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, logp {tuple(logp.shape)}")
    keep = mask > 0
    ratio = torch.where(keep, logp - anchor, torch.zeros_like(logp)).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    token_loss = -torch.minimum(plain, clipped)
    if weight is not None:
        token_loss = token_loss * weight
    loss = torch.where(keep, token_loss * mask, torch.zeros_like(token_loss)).sum()
    return loss, {"clipped": ((plain > clipped) & keep).sum().detach()}


def truncated_importance_weight(old: Tensor, mu: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(exp(old - mu), cap) per token, detached; 1 where masked (TIS, Yao et al. 2025). `cap` 0 gives ones."""
    if cap == 0:
        return torch.ones_like(old)
    gap = torch.where(mask > 0, old - mu, torch.zeros_like(old))
    return gap.exp().clamp(max=cap).detach()
