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
    """Scores of a forward pass at each token of a micro-batch, `[T]` float32; with gradient in a train step.

    Attributes:
        logp: Log-prob of the token.
        entropy: Entropy of the distribution that the token was sampled from.
        values: Expected return after the token.
        sum_pi_squared: Sum of the squared probabilities of that distribution, without gradient.
        divergence: Divergence of that distribution from the teacher's.
        chance: Probability of the token at the temperature of candidates, without gradient
            (rlsys.algo.sft.imitation).
        expected: Mean log-prob of candidates.
    """

    logp: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    divergence: Tensor | None = None
    chance: Tensor | None = None
    expected: Tensor | None = None

    def to(self, device: torch.device) -> Self:
        tensors = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return type(self)(**tensors)


@dataclass(frozen=True)
class Scoring:
    """Computation of the policy's token scores from hidden states.

    Attributes:
        output: The policy's output layer; None if this rank does not have the last pipeline stage.
        entropy: Whether to compute entropies.
        squares: Whether to compute `sum_pi_squared` in passes without gradient.
        head: Layer that computes values; None: no values.
        teacher: Settings of the comparison with a teacher; None: no comparison.
        candidates: Temperature at which candidates are sampled (rlsys.algo.sft.imitation); None: no candidates.
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
    """Computation of token values by a model that ends in a value layer; its log-probs are 0.

    Attributes:
        layer: The value layer; None if this rank does not have the last pipeline stage.
    """

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
        logits: `[N, V / tp]`. They are overwritten: a second copy would double the memory.
        targets: The tokens that follow.
        temperature: Sampling temperature.
        entropy: Whether to compute the entropy of the distribution that each token was sampled from.
        squares: Whether to compute the sum of the squared probabilities of that distribution.
        teacher: Settings of the comparison with a teacher (rlsys.algo.methods.distill). They are used if the targets
            contain the teacher's log-probs.

    Returns:
        Fields of `Scores` by name, `[N]`.
    """
    logits = sampling_logits(logits, targets, temperature)
    # The sum of squares comes first: the other scores overwrite the logits.
    scores = {"sum_pi_squared": sum_pi_squared(logits)} if squares else {}
    if teacher is not None and targets.teacher_ids is not None:
        return scores | _distillation_scores(logits, targets, teacher)
    if not entropy:
        return scores | {"logp": -vocab_parallel_cross_entropy(logits, targets.following)}
    logp, entropies = logprob_and_entropy(logits, targets.following)
    return scores | {"logp": logp, "entropy": entropies}


def _candidate_scores(
    logits: Tensor, targets: Targets, temperature: float, candidates: float
) -> dict[str, Tensor]:
    """Return log-probs, and the scores of candidates at temperature `candidates`, `[N]` each."""
    logits = sampling_logits(logits, targets, temperature)
    logp, chance, expected = logprob_and_candidates(logits, targets.following, candidates)
    return {"logp": logp, "chance": chance, "expected": expected}


def _distillation_scores(logits: Tensor, targets: Targets, section: TeacherSection) -> dict[str, Tensor]:
    """Return log-probs, entropies, and divergences from the teacher, `[N]` each."""
    assert targets.teacher_ids is not None and targets.teacher_logp is not None
    if section.top_k == 0:
        logp, entropy = logprob_and_entropy(logits, targets.following)
        divergence = torch.where(targets.predicts, logp - targets.teacher_logp[:, 0], torch.zeros_like(logp))
        return {"logp": logp, "entropy": entropy, "divergence": divergence}
    ids = torch.cat([targets.following[:, None], targets.teacher_ids], 1)
    columns = logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size()
    logprobs, entropy = logprobs_and_entropy(logits, ids)
    policy, teacher = logprobs[:, 1:], targets.teacher_logp
    has_all_ids = policy.shape[1] == columns
    divergence = divergence_over(
        policy, teacher, section.direction, tail_bucket=section.tail_bucket and not has_all_ids,
        least_logprob=section.least_logprob,
    )  # fmt: skip
    divergence = torch.where(targets.predicts, divergence, torch.zeros_like(divergence))
    return {"logp": logprobs[:, 0], "entropy": entropy, "divergence": divergence}


def sampling_logits(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Return the logits of the distributions from which the following tokens were sampled.

    The function divides logits `[N, V / tp]` by the temperature and excludes ids outside the sampling mask (Keep
    Sampling Mask, DeepSeek-V3.2, arXiv 2512.02556, section 3.1). Excluded ids have probability 0 in all scores, so
    they need no gradient. Float32 logits are overwritten.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if targets.support_at is None or targets.support_ids is None:
        return logits
    columns = logits.shape[-1]
    ids = targets.support_ids - parallel_state.get_tensor_model_parallel_rank() * columns
    is_local = (ids >= 0) & (ids < columns)
    rows, ids = targets.support_at[is_local], ids[is_local]
    with torch.no_grad():
        allowed_logits = logits[rows, ids]
        logits.index_fill_(0, targets.support_at.unique(), MASKED_LOGIT)
        logits[rows, ids] = allowed_logits
    return logits


def align_to_tokens(share: Share, following: Tensor) -> Tensor:
    """Shift values of next tokens, `[P / c]` or `[P / c, K]`, to these tokens, `[T]` or `[T, K]`.

    The first token of a sequence has no prediction and gets 0. Every context-parallel rank gets all values and may
    compute the whole loss: gradient flows back only into the rank's own share, so that the sum over ranks counts each
    token once.
    """
    if share.cp_group.size() > 1:
        following = gather_from_sequence_parallel_region(
            following, tensor_parallel_output_grad=False, group=share.cp_group
        )
    return following[share.padded_index].roll(1, 0).index_fill(0, share.first, 0)
