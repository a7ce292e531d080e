"""What the logits say about the tokens that are there. Shapes: T tokens of a micro-batch, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, vocab_parallel_cross_entropy
from torch import Tensor

from rlsys.algo.methods.distill import divergence, with_rest
from rlsys.trainer.model.entropy import (
    NEVER,
    logprob_and_candidates,
    logprob_and_entropy,
    logprobs_and_entropy,
    sum_pi_squared,
)
from rlsys.trainer.model.share import Share
from rlsys.trainer.model.value_head import ValueHead


@dataclass(frozen=True)
class Scores:
    """What a forward pass says about each token of a micro-batch, `[T]` float32; with gradient in a train step."""

    logp: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = (
        None  # of the distribution that the token was drawn from; without gradient
    )

    divergence: Tensor | None = None  # from a teacher's distribution
    chance: Tensor | None = None  # that a candidate is the token, without gradient (rlsys.algo.sft.imitation)
    expected: Tensor | None = None  # the mean log-prob of candidates

    def to(self, device: torch.device) -> Self:
        there = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return type(self)(**there)


@dataclass(frozen=True)
class Scoring:
    """What a pass over the policy computes of each token, beside its log-prob. `head`: gives values. `direction`:
    of the divergence from a teacher. `candidates`: the temperature of tokens that are drawn in the token's place."""

    entropy: bool
    squares: bool
    head: ValueHead | None
    direction: float | None = None
    candidates: float | None = None

    def __call__(self, output: Tensor, share: Share, temperature: float) -> Scores:
        """Of logits `[1, P / c, V / tp]`."""
        if self.candidates is not None:
            return _beside_candidates(output[0], share, temperature, self.candidates)
        values = None if self.head is None else self.head.values()
        squares = self.squares and not torch.is_grad_enabled()
        return token_scores(
            output[0], share, temperature, entropy=self.entropy, squares=squares, values=values,
            direction=self.direction,
        )  # fmt: skip


def token_scores(
    logits: Tensor,
    share: Share,
    temperature: float,
    *,
    entropy: bool,
    squares: bool,
    values: Tensor | None,
    direction: float | None = None,
) -> Scores:
    """`token_logprobs`, on request with the entropy and with the sum of squares of the distribution that each token
    was drawn from, and with `values` `[P / c]` of the token before it: the state in which it was chosen. `direction`:
    that of the divergence from a teacher, where the share has its log-probs (rlsys.algo.methods.distill)."""
    critic = None if values is None else aligned(share, values)
    logits = as_drawn(logits, share, temperature)
    squared = (
        aligned(share, sum_pi_squared(logits)) if squares else None
    )  # first: the others overwrite the logits
    if direction is not None and share.teacher_ids is not None:
        return _beside_teacher(logits, share, direction, critic, squared)
    if not entropy:
        return Scores(_of_following(logits, share), None, critic, squared)
    logp, spread = logprob_and_entropy(logits, share.following)
    return Scores(aligned(share, logp), aligned(share, spread), critic, squared)


def _beside_candidates(logits: Tensor, share: Share, temperature: float, candidates: float) -> Scores:
    found = logprob_and_candidates(as_drawn(logits, share, temperature), share.following, candidates)
    logp, chance, expected = (aligned(share, values) for values in found)
    return Scores(logp, chance=chance, expected=expected)


def _beside_teacher(
    logits: Tensor, share: Share, direction: float, critic: Tensor | None, squared: Tensor | None
) -> Scores:
    assert share.teacher_ids is not None and share.teacher_logp is not None
    ids = torch.cat([share.following[:, None], share.teacher_ids], 1)
    columns = logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size()
    found, spread = logprobs_and_entropy(logits, ids)
    policy, teacher = found[:, 1:], share.teacher_logp
    if policy.shape[1] < columns:
        policy, teacher = with_rest(policy), with_rest(teacher)
    gap = divergence(policy, teacher, direction)
    gap = torch.where(share.predicts, gap, torch.zeros_like(gap))
    return Scores(aligned(share, found[:, 0]), aligned(share, spread), critic, squared, aligned(share, gap))


def token_logprobs(logits: Tensor, share: Share, temperature: float) -> Tensor:
    """Log-prob of each token given its predecessors, `[T]` float32; 0 at the first token of a sequence.

    `logits` are those of `share`: its tokens, and this tensor-parallel rank's columns `V / tp`. They are
    overwritten: no second copy is made, neither by the temperature nor by megatron's cross entropy.
    """
    return _of_following(as_drawn(logits, share, temperature), share)


def _of_following(logits: Tensor, share: Share) -> Tensor:
    return aligned(share, -vocab_parallel_cross_entropy(logits, share.following))


def as_drawn(logits: Tensor, share: Share, temperature: float) -> Tensor:
    """The logits of the distributions that the share's following tokens were drawn from: at this temperature, and
    where sampling had cut ids off, without these (Keep Sampling Mask, DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    What was cut off needs no gradient: its probability is 0 in all that is computed here, and with it the gradient.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if share.support_at is None or share.support_ids is None:
        return logits
    columns = logits.shape[-1]
    ids = share.support_ids - parallel_state.get_tensor_model_parallel_rank() * columns
    mine = (ids >= 0) & (ids < columns)
    at, ids = share.support_at[mine], ids[mine]
    with torch.no_grad():
        kept = logits[at, ids]
        logits.index_fill_(0, share.support_at.unique(), NEVER)
        logits[at, ids] = kept
    return logits


def aligned(share: Share, following: Tensor) -> Tensor:
    """Shift next-token values, `[P / c]` or `[P / c, K]`, onto the tokens that they belong to, `[T]` or `[T, K]`.
    The first token of a sequence, which nothing predicts, gets 0.

    Every context-parallel rank gets all of them and may compute the whole loss: gradient flows back into the rank's
    own share only, so that the sum over ranks counts each token once.
    """
    if share.cp_group.size() > 1:
        following = gather_from_sequence_parallel_region(
            following, tensor_parallel_output_grad=False, group=share.cp_group
        )
    return following[share.place].roll(1, 0).index_fill(0, share.first, 0)
