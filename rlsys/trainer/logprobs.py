"""Token scores from logits: log-prob, entropy, divergence. Shapes: T tokens of a micro-batch, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, vocab_parallel_cross_entropy
from torch import Tensor

from rlsys.algo.methods.distill import divergence_over
from rlsys.config.algo import TeacherSection
from rlsys.trainer.model.context_parallel import Share, Targets
from rlsys.trainer.model.entropy import (
    MASKED_LOGIT,
    logprob_and_candidates,
    logprob_and_entropy,
    logprobs_and_entropy,
    sum_pi_squared,
)
from rlsys.trainer.model.output_layer import OutputLayer
from rlsys.trainer.model.value_head import ValueLayer


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

    `output`: the policy's output layer; None on other pipeline stages. `head` computes values. `teacher`: what is
    compared with a teacher. `candidates`: temperature at which alternative tokens are drawn.
    """

    output: OutputLayer | None
    entropy: bool
    squares: bool
    head: ValueLayer | None
    teacher: TeacherSection | None = None
    candidates: float | None = None

    def __call__(self, hidden: Tensor, share: Share, temperature: float) -> Scores:
        """Compute the scores from the last hidden states `[P / c or P / (c tp), 1, H]`."""
        assert self.output is not None, "only the last pipeline stage computes scores"
        squares = self.squares and not torch.is_grad_enabled()

        def score_rows(logits: Tensor, rows: slice) -> dict[str, Tensor]:
            targets = share.targets(rows)
            if self.candidates is not None:
                return _candidate_scores(logits, targets, temperature, self.candidates)
            return token_scores(
                logits, targets, temperature, entropy=self.entropy, squares=squares, teacher=self.teacher
            )

        scores = self.output.scores(hidden, score_rows)
        if self.head is not None:
            scores["values"] = self.head.values(hidden)
        return Scores(**{name: align_to_tokens(share, values) for name, values in scores.items()})


@dataclass(frozen=True)
class ValueScoring:
    """Values of tokens from a model with a value layer; log-probs are 0. `layer`: None on other pipeline stages."""

    layer: ValueLayer | None

    def __call__(self, hidden: Tensor, share: Share, temperature: float) -> Scores:
        """Compute the values from the last hidden states `[P / c or P / (c tp), 1, H]`."""
        assert self.layer is not None, "only the last pipeline stage computes scores"
        values = align_to_tokens(share, self.layer.values(hidden))
        return Scores(torch.zeros_like(values), values=values)


def token_scores(
    logits: Tensor,
    targets: Targets,
    temperature: float,
    *,
    entropy: bool,
    squares: bool,
    teacher: TeacherSection | None = None,
) -> dict[str, Tensor]:
    """Score the token after each of N tokens.

    Args:
        logits: `[N, V / tp]`; overwritten: no second copy is made, neither by the temperature nor by megatron's
            cross entropy.
        targets: The tokens that follow.
        temperature: Sampling temperature.
        entropy: Whether to compute the entropy of the distribution that each token was drawn from.
        squares: Whether to compute the sum of squares of that distribution.
        teacher: What is compared with a teacher (rlsys.algo.methods.distill), if the targets have the teacher's
            log-probs.

    Returns:
        Fields of `Scores` by name, `[N]`.
    """
    logits = sampling_logits(logits, targets, temperature)
    scores = (
        {"sum_pi_squared": sum_pi_squared(logits)} if squares else {}
    )  # first: the others overwrite the logits
    if teacher is not None and targets.teacher_ids is not None:
        return scores | _distillation_scores(logits, targets, teacher)
    if not entropy:
        return scores | {"logp": -vocab_parallel_cross_entropy(logits, targets.following)}
    logp, spread = logprob_and_entropy(logits, targets.following)
    return scores | {"logp": logp, "entropy": spread}


def _candidate_scores(
    logits: Tensor, targets: Targets, temperature: float, candidates: float
) -> dict[str, Tensor]:
    logits = sampling_logits(logits, targets, temperature)
    logp, chance, expected = logprob_and_candidates(logits, targets.following, candidates)
    return {"logp": logp, "chance": chance, "expected": expected}


def _distillation_scores(logits: Tensor, targets: Targets, section: TeacherSection) -> dict[str, Tensor]:
    assert targets.teacher_ids is not None and targets.teacher_logp is not None
    if section.top_k == 0:
        logp, entropy = logprob_and_entropy(logits, targets.following)
        gap = torch.where(targets.predicts, logp - targets.teacher_logp[:, 0], torch.zeros_like(logp))
        return {"logp": logp, "entropy": entropy, "divergence": gap}
    ids = torch.cat([targets.following[:, None], targets.teacher_ids], 1)
    columns = logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size()
    logprobs, entropy = logprobs_and_entropy(logits, ids)
    policy, teacher = logprobs[:, 1:], targets.teacher_logp
    is_whole = policy.shape[1] == columns
    gap = divergence_over(
        policy, teacher, section.direction, tail_bucket=section.tail_bucket and not is_whole,
        least_logprob=section.least_logprob,
    )  # fmt: skip
    gap = torch.where(targets.predicts, gap, torch.zeros_like(gap))
    return {"logp": logprobs[:, 0], "entropy": entropy, "divergence": gap}


def sampling_logits(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Return the logits of the distributions from which the following tokens were sampled.

    They are scaled by the temperature, and ids outside the sampling mask are excluded (Keep Sampling Mask,
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1). Excluded ids have probability 0 in all scores, so they need no
    gradient.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if targets.support_at is None or targets.support_ids is None:
        return logits
    columns = logits.shape[-1]
    ids = targets.support_ids - parallel_state.get_tensor_model_parallel_rank() * columns
    is_local = (ids >= 0) & (ids < columns)
    at, ids = targets.support_at[is_local], ids[is_local]
    with torch.no_grad():
        allowed = logits[at, ids]
        logits.index_fill_(0, targets.support_at.unique(), MASKED_LOGIT)
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
