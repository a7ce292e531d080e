"""Losses of Tinker's protocol, per token. Pure functions of tensors.

    cross_entropy         -w log p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)
    cispo                 -stop_gradient(clip(r, low, high)) A log p
    dro                   -(A log p - beta / 2 (log p - log q)^2)

    p   probability of the token under the current model
    q   its probability under the sampling model; log q is the input `logprobs`
    r   p / q
    A   the input `advantages`
    w   the input `weights`

The formulas are from the protocol's documentation (tinker-docs, Loss functions). The loss of a pass is the sum over
tokens. The protocol has no mask: a position with weight or advantage 0 has no loss. In dro, a position with advantage
0 has the squared term, unless its log q is 0, too, which marks the prompt. Log-ratios are clamped to +-20, as
everywhere in rlsys.
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
"""(log p `[T]`, inputs `[T]` by name, parameters) -> losses `[T]`."""


@dataclass(frozen=True)
class LossKind:
    """A loss of the protocol.

    Attributes:
        inputs: names of the inputs of each position, in addition to `target_tokens`. A position where the last one is
            0 has no loss.
        params: parameters with their defaults; NaN: required.
        token_loss: computes the losses.
        at_advantage_0: whether positions with advantage 0 have a loss, unless `logprobs` is 0, too.
    """

    inputs: tuple[str, ...]
    params: Params
    token_loss: TokenLoss
    at_advantage_0: bool = False


def _log_ratio(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (logp - inputs["logprobs"]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _ratio(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return _log_ratio(logp, inputs).exp()


def _cross_entropy(logp: Tensor, inputs: Mapping[str, Tensor], _: Params) -> Tensor:
    return -logp * inputs["weights"]


def _importance_sampling(logp: Tensor, inputs: Mapping[str, Tensor], _: Params) -> Tensor:
    return -_ratio(logp, inputs) * inputs["advantages"]


def _ppo(logp: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
    low, high = params["clip_low_threshold"], params["clip_high_threshold"]
    return clipped_surrogate(_ratio(logp, inputs), inputs["advantages"], low, high)


def _cispo(logp: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
    low, high = params["clip_low_threshold"], params["clip_high_threshold"]
    clipped_ratio = _ratio(logp, inputs).clamp(low, high).detach()
    return -clipped_ratio * inputs["advantages"] * logp


def _dro(logp: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
    return -(logp * inputs["advantages"] - 0.5 * params["beta"] * _log_ratio(logp, inputs).square())


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


def token_losses(kind: LossKind, logp: Tensor, inputs: Mapping[str, Tensor], params: Params) -> Tensor:
    """Compute the losses of all tokens.

    Args:
        kind: the loss.
        logp: log-probs `[T]` under the current model.
        inputs: inputs `[T]` of the loss, by name.
        params: parameters. Those that are missing have the loss's defaults.

    Returns:
        Losses `[T]`, exactly 0 at positions without a loss.
    """
    losses = kind.token_loss(logp, inputs, {**kind.params, **params})
    trained = inputs[kind.inputs[-1]] != 0
    if kind.at_advantage_0:
        trained = trained | (inputs["logprobs"] != 0)
    return torch.where(trained, losses, torch.zeros_like(losses))
