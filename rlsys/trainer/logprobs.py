"""Token scores from logits: log-prob, entropy, divergence. Shapes: T tokens of a micro-batch, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, vocab_parallel_cross_entropy
from torch import Tensor

from rlsys.algo.methods.distill import divergence, with_rest
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.model.entropy import (
    MASKED_LOGIT,
    logprob_and_candidates,
    logprob_and_entropy,
    logprobs_and_entropy,
    sum_pi_squared,
)
from rlsys.trainer.model.value_head import ValueHead


@dataclass(frozen=True)
class Scores:
    """Scores of a forward pass at each token of a micro-batch, `[T]` float32; with gradient in a train step."""

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
        tensors = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return type(self)(**tensors)


@dataclass(frozen=True)
class Scoring:
    """Selection of the token scores that a pass over the policy computes in addition to log-probs.

    `head` computes values. `direction`: of the divergence from a teacher. `candidates`: temperature at which
    alternative tokens are drawn.
    """

    entropy: bool
    squares: bool
    head: ValueHead | None
    direction: float | None = None
    candidates: float | None = None

    def __call__(self, output: Tensor, share: Share, temperature: float) -> Scores:
        """Compute the scores from logits `[1, P / c, V / tp]`."""
        if self.candidates is not None:
            return _candidate_scores(output[0], share, temperature, self.candidates)
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
    """Compute `token_logprobs` and the requested additional scores of each token.

    Args:
        logits: `[P / c, V / tp]`; overwritten.
        share: The tokens of this rank.
        temperature: Sampling temperature.
        entropy: Whether to compute the entropy of the distribution that each token was drawn from.
        squares: Whether to compute the sum of squares of that distribution.
        values: `[P / c]`, of the token before: the state in which the token was chosen. None: no critic.
        direction: Direction of the divergence from a teacher (rlsys.algo.methods.distill), if the share has the
            teacher's log-probs.
    """
    critic = None if values is None else align_to_tokens(share, values)
    logits = sampling_logits(logits, share, temperature)
    squared = (
        align_to_tokens(share, sum_pi_squared(logits)) if squares else None
    )  # first: the others overwrite the logits
    if direction is not None and share.teacher_ids is not None:
        return _distillation_scores(logits, share, direction, critic, squared)
    if not entropy:
        return Scores(_next_token_logprobs(logits, share), None, critic, squared)
    logp, spread = logprob_and_entropy(logits, share.following)
    return Scores(align_to_tokens(share, logp), align_to_tokens(share, spread), critic, squared)


def _candidate_scores(logits: Tensor, share: Share, temperature: float, candidates: float) -> Scores:
    parts = logprob_and_candidates(sampling_logits(logits, share, temperature), share.following, candidates)
    logp, chance, expected = (align_to_tokens(share, values) for values in parts)
    return Scores(logp, chance=chance, expected=expected)


def _distillation_scores(
    logits: Tensor, share: Share, direction: float, critic: Tensor | None, squared: Tensor | None
) -> Scores:
    assert share.teacher_ids is not None and share.teacher_logp is not None
    ids = torch.cat([share.following[:, None], share.teacher_ids], 1)
    columns = logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size()
    logprobs, entropy = logprobs_and_entropy(logits, ids)
    policy, teacher = logprobs[:, 1:], share.teacher_logp
    if policy.shape[1] < columns:
        policy, teacher = with_rest(policy), with_rest(teacher)
    gap = divergence(policy, teacher, direction)
    gap = torch.where(share.predicts, gap, torch.zeros_like(gap))
    return Scores(
        align_to_tokens(share, logprobs[:, 0]),
        align_to_tokens(share, entropy),
        critic,
        squared,
        align_to_tokens(share, gap),
    )


def token_logprobs(logits: Tensor, share: Share, temperature: float) -> Tensor:
    """Log-prob of each token given its predecessors, `[T]` float32; 0 at the first token of a sequence.

    `logits` are those of `share`: its tokens, and this tensor-parallel rank's columns `V / tp`. They are
    overwritten: no second copy is made, neither by the temperature nor by megatron's cross entropy.
    """
    return _next_token_logprobs(sampling_logits(logits, share, temperature), share)


def _next_token_logprobs(logits: Tensor, share: Share) -> Tensor:
    return align_to_tokens(share, -vocab_parallel_cross_entropy(logits, share.following))


def sampling_logits(logits: Tensor, share: Share, temperature: float) -> Tensor:
    """Return the logits of the distributions that the share's following tokens were drawn from.

    They are scaled by the temperature; ids outside the sampling mask are excluded (Keep Sampling Mask, DeepSeek-V3.2,
    arXiv 2512.02556, section 3.1). Excluded ids need no gradient: their probability is 0 in every score computed
    here, and so is the gradient.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if share.support_at is None or share.support_ids is None:
        return logits
    columns = logits.shape[-1]
    ids = share.support_ids - parallel_state.get_tensor_model_parallel_rank() * columns
    is_local = (ids >= 0) & (ids < columns)
    at, ids = share.support_at[is_local], ids[is_local]
    with torch.no_grad():
        allowed = logits[at, ids]
        logits.index_fill_(0, share.support_at.unique(), MASKED_LOGIT)
        logits[at, ids] = allowed
    return logits


def align_to_tokens(share: Share, following: Tensor) -> Tensor:
    """Shift next-token values, `[P / c]` or `[P / c, K]`, to the tokens they describe, `[T]` or `[T, K]`.

    The first token of a sequence has no prediction and gets 0. Every context-parallel rank gets all values and may
    compute the whole loss: gradient flows back into the rank's own share only, so that the sum over ranks counts each
    token once.
    """
    if share.cp_group.size() > 1:
        following = gather_from_sequence_parallel_region(
            following, tensor_parallel_output_grad=False, group=share.cp_group
        )
    return following[share.padded_index].roll(1, 0).index_fill(0, share.first, 0)
