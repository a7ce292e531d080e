"""Logits -> log-probs of the tokens that are there. Shapes: T packed tokens, V vocabulary, S sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What a forward pass says about each token of a micro-batch, `[T]` float32; with gradient in a train step."""

    logp: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None

    def to(self, device: torch.device) -> Scores:
        there = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return Scores(**there)


def token_logprobs(logits: Tensor, tokens: Tensor, cu_seqlens: Tensor, temperature: float) -> Tensor:
    """Log-prob of each token given its predecessors, `[T]` float32; 0 at the first token of a sequence.

    `logits` `[T, V / tp]` are this tensor-parallel rank's columns, and are overwritten: no second `[T, V]` is
    made, neither by the temperature nor by megatron's cross entropy. tokens `[T]`, cu_seqlens `[S+1]`.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    following = -vocab_parallel_cross_entropy(logits, tokens.roll(-1))
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[cu_seqlens[:-1].long()] = True
    return following.roll(1).masked_fill(first, 0.0)
