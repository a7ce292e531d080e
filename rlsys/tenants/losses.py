"""The losses of Tinker's protocol, token by token. Pure: tensors in, token losses out.

    cross_entropy         -w log p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)
    cispo                 -stop_gradient(clip(r, low, high)) A log p
    dro                   -(A log p - beta / 2 (log p - log q)^2)

p: the model now; q: what sampled, its `logprobs`; r = p / q; A: `advantages`; w: `weights`. As the protocol's
documentation has them (tinker-docs, Loss functions): sums over tokens, without any mean. The protocol has no mask:
positions of weight or advantage 0 have no loss; in dro those of advantage 0 have the square, but where the log-prob
is 0 as well, which stands for the prompt. Log-ratios are clamped to +-20, as all of rlsys' are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algo.losses import LOG_RATIO_LIMIT, clipped_surrogate

Params = Mapping[str, float]
TokenLoss = Callable[[Tensor, Mapping[str, Tensor], Params], Tensor]


@dataclass(frozen=True)
class LossKind:
    """`inputs`: what it needs of each position beside `target_tokens`; `params`: its numbers with their defaults, NaN
    where it has none."""

    inputs: tuple[str, ...]
    params: Params
    of_tokens: TokenLoss
    at_advantage_0: bool = False
    """Whether a position of advantage 0 has a loss, too. One whose `logprobs` is 0 as well is the prompt's."""


def _ratio(logp: Tensor, of: Mapping[str, Tensor]) -> Tensor:
    return (logp - of["logprobs"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _cross_entropy(logp: Tensor, of: Mapping[str, Tensor], _: Params) -> Tensor:
    return -logp * of["weights"]


def _importance_sampling(logp: Tensor, of: Mapping[str, Tensor], _: Params) -> Tensor:
    return -_ratio(logp, of) * of["advantages"]


def _ppo(logp: Tensor, of: Mapping[str, Tensor], params: Params) -> Tensor:
    low, high = params["clip_low_threshold"], params["clip_high_threshold"]
    return clipped_surrogate(_ratio(logp, of), of["advantages"], low, high)


def _cispo(logp: Tensor, of: Mapping[str, Tensor], params: Params) -> Tensor:
    kept = _ratio(logp, of).clamp(params["clip_low_threshold"], params["clip_high_threshold"]).detach()
    return -kept * of["advantages"] * logp


def _dro(logp: Tensor, of: Mapping[str, Tensor], params: Params) -> Tensor:
    gap = (logp - of["logprobs"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return -(logp * of["advantages"] - 0.5 * params["beta"] * gap.square())


_SAMPLED = ("logprobs", "advantages")
_PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CISPO = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
LOSSES = {
    "cross_entropy": LossKind(("weights",), {}, _cross_entropy),
    "importance_sampling": LossKind(_SAMPLED, {}, _importance_sampling),
    "ppo": LossKind(_SAMPLED, _PPO, _ppo),
    "cispo": LossKind(_SAMPLED, _CISPO, _cispo),
    "dro": LossKind(_SAMPLED, {"beta": math.nan}, _dro, at_advantage_0=True),
}


def token_losses(kind: LossKind, logp: Tensor, of: Mapping[str, Tensor], params: Params) -> Tensor:
    """`[T]`, exactly 0 where nothing is trained: weight or advantage 0; of dro, advantage and log-prob 0."""
    losses = kind.of_tokens(logp, of, {**kind.params, **params})
    trained = of[kind.inputs[-1]] != 0
    if kind.at_advantage_0:
        trained = trained | (of["logprobs"] != 0)
    return torch.where(trained, losses, torch.zeros_like(losses))
