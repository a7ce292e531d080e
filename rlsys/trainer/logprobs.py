"""What the logits say about the tokens that are there. Shapes: T tokens of a micro-batch, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from rlsys.trainer.entropy import logprob_and_entropy, sum_pi_squared
from rlsys.trainer.share import Share


@dataclass(frozen=True)
class Scores:
    """What a forward pass says about each token of a micro-batch, `[T]` float32; with gradient in a train step."""

    logp: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = (
        None  # of the distribution that the token was drawn from; without gradient
    )

    def to(self, device: torch.device) -> Scores:
        there = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return Scores(**there)


def token_scores(
    logits: Tensor, share: Share, temperature: float, *, entropy: bool, squares: bool, values: Tensor | None
) -> Scores:
    """`token_logprobs`, on request with the entropy and with the sum of squares of the distribution that each token
    was drawn from, and with `values` `[P / c]` of the token before it: the state in which it was chosen."""
    critic = None if values is None else share.aligned(values)
    logits = logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    squared = (
        share.aligned(sum_pi_squared(logits)) if squares else None
    )  # first: the others overwrite the logits
    if not entropy:
        return Scores(token_logprobs(logits, share, 1.0), None, critic, squared)
    logp, spread = logprob_and_entropy(logits, share.following)
    return Scores(share.aligned(logp), share.aligned(spread), critic, squared)


def token_logprobs(logits: Tensor, share: Share, temperature: float) -> Tensor:
    """Log-prob of each token given its predecessors, `[T]` float32; 0 at the first token of a sequence.

    `logits` are those of `share`: its tokens, and this tensor-parallel rank's columns `V / tp`. They are
    overwritten: no second copy is made, neither by the temperature nor by megatron's cross entropy.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return share.aligned(-vocab_parallel_cross_entropy(logits, share.following))
