"""VCPO (Stable Asynchrony): step scaling by effective sample size, and the optimal off-policy baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps
from rlsys.algo.batch import Samples
from rlsys.algo.hooks import Hook
from rlsys.algo.segments import group_index, group_mean, group_std, sum_by


def effective_share(log_weight: Tensor) -> float:
    """Return ESS / n = (sum w)^2 / (n sum w^2) for log-weights `[n]`, in log space, so that it does not overflow."""
    if len(log_weight) == 0:
        return 1.0
    first, second = torch.logsumexp(log_weight.double(), 0), torch.logsumexp(2 * log_weight.double(), 0)
    return float((2 * first - second).exp() / len(log_weight))


class EssScaling(Hook):
    """Smaller steps on staler data: lr times sqrt(min(1, rho / rho0)), rho = ESS / n of the sequence weights.

    w_i = exp(sum_t old - mu), ESS = (sum w)^2 / sum w^2 over all samples of the update, also those of advantage 0,
    which are packed for this.
    """

    paper: ClassVar[str] = "VCPO (Stable Asynchrony), effective-sample-size step scaling"
    evidence: ClassVar[str] = "R"
    rho0: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of effective samples from which the learning rate is not reduced."""
    shape: Literal["sqrt", "linear"] = "sqrt"
    """Function of the share, below `rho0`."""
    every_sample: ClassVar[bool] = True

    def needs(self) -> frozenset[str]:
        return frozenset({"old"})

    def lr_factor(self, samples: Samples, rows: Sequence[int], size: float) -> float:
        share = effective_share(samples.column("log_weight")[list(rows)])
        ratio = min(1.0, share / self.rho0)
        return math.sqrt(ratio) if self.shape == "sqrt" else ratio


class MinimumVariance(Advantage):
    """(R - b) / (std + eps) with the baseline b that minimises the variance of off-policy gradients.

    b = sum w^2 |g|^2 R / sum w^2 |g|^2 over the group; w = exp(sum_t old - mu), |g| the norm of the gradient of the
    sample's log-prob. The gradient by the weights would take one backward pass per sample. "score" uses the exact
    gradient by the logits: |g|^2 = sum_t (1 - 2 pi_t + sum_v pi_tv^2). "length" and "one" are cheaper proxies that
    are not in the paper: |g|^2 is proportional to the response's length, or constant.
    """

    paper: ClassVar[str] = "VCPO (Stable Asynchrony), optimal off-policy baseline"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    norm: Literal["score", "length", "one"] = "score"
    """Estimate of the squared gradient norm."""
    eps: Eps = 1e-6
    """Added to the standard deviation."""

    def needs(self) -> frozenset[str]:
        return frozenset({"old", "sum_pi_squared"} if self.norm == "score" else {"old"})

    def __call__(self, samples: Samples) -> Tensor:
        rewards, log_weight = samples.reward, samples.column("log_weight").double()
        index, sizes = group_index(samples.group_ids)
        largest = torch.full((len(sizes),), -torch.inf, dtype=torch.float64, device=index.device)
        largest = largest.scatter_reduce(0, index, log_weight, "amax")
        share = (2 * (log_weight - largest[index])).exp()
        if self.norm == "score":  # a response with probability 1 for every token has no gradient
            share = share * samples.column("score_norm").double().clamp(min=1e-9)
        elif self.norm == "length":
            share = share * samples.lengths.clamp(min=1)
        # Relative to the mean, so that equal rewards give exactly 0.
        centred = rewards - group_mean(rewards, samples.group_ids)
        top = sum_by(share * centred, index, len(sizes))
        baseline = (top / sum_by(share, index, len(sizes)))[index].to(rewards.dtype)
        return (centred - baseline) / (group_std(rewards, samples.group_ids) + self.eps)
