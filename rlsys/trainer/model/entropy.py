"""Log-probs, entropy, sum of squared probabilities and mean over candidates, over a tensor-parallel vocabulary.

Shapes: P tokens, V vocabulary size, tp tensor-parallel ranks. All functions are collective over these ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

MASKED_LOGIT = -1e30
"""Logit of an id that cannot be sampled. Its probability is exactly 0; minus infinity would result in NaN."""

ROWS = 256
"""Number of rows that are computed at a time, which bounds the memory besides the logits."""


def logprob_and_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of a target id, and the entropy H = -sum p log p, of each row. Both have a gradient.

    Args:
        logits: `[P, V / tp]` float32. The forward pass overwrites them by the probabilities, and the backward pass by
            the gradient, to save memory.
        target: `[P]` ids.

    Returns:
        log p(target) and H, `[P]` float32 each.
    """
    logp, entropy = logprobs_and_entropy(logits, target[:, None])
    return logp[:, 0], entropy


def logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of N target ids `[P, N]`, and the entropy, of each row. See logprob_and_entropy.

    Returns:
        log p(targets) `[P, N]` and H `[P]`.
    """
    logp, entropy = _LogProbEntropy.apply(logits, targets)
    return logp, entropy


def logprob_and_candidates(
    logits: Tensor, target: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log p(target), q(target) and sum q log p of each row, where q is p at another temperature.

    q has no gradient; log p has.

    Args:
        logits: `[P, V / tp]` float32. The forward pass overwrites them by log p, and the backward pass by the
            gradient.
        target: `[P]` ids.
        temperature: Temperature of q.

    Returns:
        log p(target), q(target) and sum q log p, `[P]` float32 each.
    """
    logp, chance, expected = _LogProbCandidates.apply(logits, target, temperature)
    return logp, chance, expected


def sum_pi_squared(logits: Tensor) -> Tensor:
    """Return the sum of the squared probabilities of each row, `[P]` float32, without gradient.

    `logits` `[P, V / tp]` are not changed.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    logits = logits.detach()
    largest = logits.max(dim=-1).values
    if group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sums = logits.new_empty(2, len(logits))  # exp(x), exp(x)^2; x = logit - largest
    for rows in _row_slices(logits):
        weight = (logits[rows] - largest[rows, None]).exp_()
        sums[0, rows] = weight.sum(-1)
        sums[1, rows] = weight.square_().sum(-1)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums[1] / sums[0] ** 2


class _LogProbEntropy(torch.autograd.Function):
    """Autograd function of logprobs_and_entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        columns = logits.shape[-1]
        local_ids = targets - group.rank() * columns
        is_local = (local_ids >= 0) & (local_ids < columns)
        local_ids = local_ids.clamp(0, columns - 1)
        largest = logits.max(dim=-1).values
        if group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        # exp(x), x exp(x), the targets' x; x = logit - largest
        sums = logits.new_empty(2 + targets.shape[1], len(logits))
        for rows in _row_slices(logits):
            x = logits[rows].sub_(largest[rows, None])
            picked = x.gather(1, local_ids[rows])
            sums[2:, rows] = torch.where(is_local[rows], picked, torch.zeros_like(picked)).T
            weight = x.exp()
            sums[1, rows] = x.mul_(weight).sum(-1)
            sums[0, rows] = x.copy_(weight).sum(-1)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, target_logits = sums[0], sums[1], sums[2:].T
        logits.div_(total[:, None])
        entropy = total.log() - weighted / total
        ctx.save_for_backward(logits, entropy, local_ids, is_local)
        return target_logits - total.log()[:, None], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Compute the gradient from dH / dlogit_j = -p_j (log p_j + H) and d log p(target) = e(target) - p."""
        probs, entropy, local_ids, is_local = ctx.saved_tensors
        grad_logp, grad_entropy = gradients
        for rows in _row_slices(probs):
            p = probs[rows]
            surprise = p.clamp(min=torch.finfo(p.dtype).tiny).log_().add_(entropy[rows, None])
            p.mul_(surprise.mul_(-grad_entropy[rows, None]).sub_(grad_logp[rows].sum(1, keepdim=True)))
            p.scatter_add_(1, local_ids[rows], grad_logp[rows] * is_local[rows])
        return probs, None


class _LogProbCandidates(torch.autograd.Function):
    """Autograd function of logprob_and_candidates."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        columns = logits.shape[-1]
        local_ids = target - group.rank() * columns
        is_local = (local_ids >= 0) & (local_ids < columns)
        local_ids = local_ids.clamp(0, columns - 1)[:, None]
        largest = logits.max(dim=-1).values
        if group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sums = logits.new_empty(2, len(logits))  # exp(x), the target's x; x = logit - largest
        for rows in _row_slices(logits):
            x = logits[rows].sub_(largest[rows, None])
            sums[1, rows] = x.gather(1, local_ids[rows])[:, 0] * is_local[rows]
            sums[0, rows] = x.exp().sum(-1)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        logp = sums[1] - log_total
        candidate_sums = logits.new_empty(2, len(logits))  # p ** (1 / temperature), and that times log p
        for rows in _row_slices(logits):
            x = logits[rows].sub_(log_total[rows, None])
            weight = (x / temperature).exp_()
            candidate_sums[0, rows] = weight.sum(-1)
            candidate_sums[1, rows] = weight.mul_(x).sum(-1)
        if group.size() > 1:
            dist.all_reduce(candidate_sums, group=group)
        chance = (logp / temperature).exp() / candidate_sums[0]
        ctx.save_for_backward(logits, candidate_sums[0], local_ids, is_local)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(chance)
        return logp, chance, candidate_sums[1] / candidate_sums[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Compute the gradient from d log p(target) = e(target) - p and d sum q log p = q - p."""
        logs, total, local_ids, is_local = ctx.saved_tensors
        grad_logp, _, grad_expected = gradients
        for rows in _row_slices(logs):
            x = logs[rows]
            q = (x / ctx.temperature).exp_().mul_((grad_expected[rows] / total[rows])[:, None])
            x.exp_().mul_(-(grad_logp[rows] + grad_expected[rows])[:, None]).add_(q)
            x.scatter_add_(1, local_ids[rows], (grad_logp[rows] * is_local[rows])[:, None])
        return logs, None, None


def _row_slices(logits: Tensor) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, len(logits), ROWS))
