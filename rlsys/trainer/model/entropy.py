"""Log-prob, entropy, sum of squares and the mean over drawn tokens, over a tensor-parallel vocabulary.

Shapes: P tokens, V / tp columns of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

NEVER = -1e30
"""Logit of an id that cannot be drawn. Its probability is exactly 0; minus infinity times that would be no number."""

ROWS = 256
"""Rows that are worked on at a time: all that is ever held beside the logits."""


def logprob_and_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """log p(target) and H = -sum p log p of each row, `[P]` float32, both with gradient.

    `logits` `[P, V / tp]` float32 are overwritten by the probabilities, which the backward pass overwrites by the
    gradient: no second copy is made. dH/dlogit_j = -p_j (log p_j + H).
    """
    logp, entropy = logprobs_and_entropy(logits, target[:, None])
    return logp[:, 0], entropy


def logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same of several ids `[P, N]` of each row: `[P, N]` and `[P]`."""
    logp, entropy = _LogProbEntropy.apply(logits, targets)
    return logp, entropy


def logprob_and_candidates(
    logits: Tensor, target: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target) of each row; q(target), where q is p at this temperature, without gradient; sum q log p, with the
    gradient of log p alone. Each `[P]` float32.

    `logits` `[P, V / tp]` float32 are overwritten by log p, and by the gradient in the backward pass.
    """
    logp, chance, expected = _LogProbCandidates.apply(logits, target, temperature)
    return logp, chance, expected


def sum_pi_squared(logits: Tensor) -> Tensor:
    """sum_v pi_v^2 of each row, `[P]` float32, without gradient. `logits` `[P, V / tp]` float32 stay as they are."""
    group = parallel_state.get_tensor_model_parallel_group()
    logits = logits.detach()
    largest = logits.max(dim=-1).values
    if group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sums = logits.new_empty(2, len(logits))  # exp(x), exp(x)^2; x = logit - largest
    for at in _in_parts(logits):
        weight = (logits[at] - largest[at, None]).exp_()
        sums[0, at] = weight.sum(-1)
        sums[1, at] = weight.square_().sum(-1)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums[1] / sums[0] ** 2


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        columns = logits.shape[-1]
        place = targets - group.rank() * columns
        mine = (place >= 0) & (place < columns)
        place = place.clamp(0, columns - 1)
        largest = logits.max(dim=-1).values
        if group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sums = logits.new_empty(
            2 + targets.shape[1], len(logits)
        )  # exp(x), x exp(x), the targets' x; x = logit - largest
        for at in _in_parts(logits):
            x = logits[at].sub_(largest[at, None])
            picked = x.gather(1, place[at])
            sums[2:, at] = torch.where(mine[at], picked, torch.zeros_like(picked)).T
            weight = x.exp()
            sums[1, at] = x.mul_(weight).sum(-1)
            sums[0, at] = x.copy_(weight).sum(-1)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums[0], sums[1], sums[2:].T
        logits.div_(total[:, None])
        entropy = total.log() - weighted / total
        ctx.save_for_backward(logits, entropy, place, mine)
        return chosen - total.log()[:, None], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probs, entropy, place, mine = ctx.saved_tensors
        of_logp, of_entropy = gradients
        for at in _in_parts(probs):
            p = probs[at]
            surprise = p.clamp(min=torch.finfo(p.dtype).tiny).log_().add_(entropy[at, None])
            p.mul_(surprise.mul_(-of_entropy[at, None]).sub_(of_logp[at].sum(1, keepdim=True)))
            p.scatter_add_(1, place[at], of_logp[at] * mine[at])
        return probs, None


class _LogProbCandidates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        columns = logits.shape[-1]
        place = target - group.rank() * columns
        mine = (place >= 0) & (place < columns)
        place = place.clamp(0, columns - 1)[:, None]
        largest = logits.max(dim=-1).values
        if group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sums = logits.new_empty(2, len(logits))  # exp(x), the target's x; x = logit - largest
        for at in _in_parts(logits):
            x = logits[at].sub_(largest[at, None])
            sums[1, at] = x.gather(1, place[at])[:, 0] * mine[at]
            sums[0, at] = x.exp().sum(-1)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        logp = sums[1] - log_total
        drawn = logits.new_empty(2, len(logits))  # p ** (1 / temperature), and that times log p
        for at in _in_parts(logits):
            x = logits[at].sub_(log_total[at, None])
            weight = (x / temperature).exp_()
            drawn[0, at] = weight.sum(-1)
            drawn[1, at] = weight.mul_(x).sum(-1)
        if group.size() > 1:
            dist.all_reduce(drawn, group=group)
        chance = (logp / temperature).exp() / drawn[0]
        ctx.save_for_backward(logits, drawn[0], place, mine)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(chance)
        return logp, chance, drawn[1] / drawn[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d log p(target) = e(target) - p, and d sum q log p = q - p."""
        logs, total, place, mine = ctx.saved_tensors
        of_logp, _, of_expected = gradients
        for at in _in_parts(logs):
            x = logs[at]
            q = (x / ctx.temperature).exp_().mul_((of_expected[at] / total[at])[:, None])
            x.exp_().mul_(-(of_logp[at] + of_expected[at])[:, None]).add_(q)
            x.scatter_add_(1, place[at], (of_logp[at] * mine[at])[:, None])
        return logs, None, None


def _in_parts(rows: Tensor) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, len(rows), ROWS))
