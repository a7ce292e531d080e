"""VCPO (Stable Asynchrony): a learning rate scaled by effective sample size, and an optimal off-policy baseline."""

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
    """Return the effective sample size divided by n, (sum w)^2 / (n sum w^2), for log-weights `[n]`; 1 for none.

    The computation in log space does not overflow.
    """
    if len(log_weight) == 0:
        return 1.0
    first, second = torch.logsumexp(log_weight.double(), 0), torch.logsumexp(2 * log_weight.double(), 0)
    return float((2 * first - second).exp() / len(log_weight))


class EssScaling(Hook):
    """Multiply the learning rate by sqrt(min(1, rho / rho0)), which is smaller on staler data.

    rho = ESS / n is the effective sample size per sample of the update, with weights w = exp(sum_t old - mu) and
    ESS = (sum w)^2 / sum w^2. Samples with advantage 0 count, and are packed for this purpose.
    """

    paper: ClassVar[str] = "VCPO (Stable Asynchrony), effective-sample-size step scaling"
    evidence: ClassVar[str] = "R"
    rho0: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest rho without a reduction of the learning rate."""
    shape: Literal["sqrt", "linear"] = "sqrt"
    """Factor for rho below `rho0`. sqrt: sqrt(rho / rho0). linear: rho / rho0."""
    every_sample: ClassVar[bool] = True

    def needs(self) -> frozenset[str]:
        return frozenset({"old"})

    def lr_factor(self, samples: Samples, rows: Sequence[int], size: float) -> float:
        share = effective_share(samples.column("log_weight")[list(rows)])
        ratio = min(1.0, share / self.rho0)
        return math.sqrt(ratio) if self.shape == "sqrt" else ratio


class MinimumVariance(Advantage):
    """(R - b) / (std + eps) with the baseline b that minimises the variance of off-policy gradients.

    b = sum w^2 |g|^2 R / sum w^2 |g|^2 over the group, where w = exp(sum_t old - mu) and |g| is the norm of the
    gradient of the sample's log-prob. The exact gradient with respect to the weights would need a backward pass for
    each sample. `norm` selects an estimate of |g|^2:
    - `score`: the squared norm of the gradient with respect to the logits, sum_t (1 - 2 pi_t + sum_v pi_tv^2);
    - `length`: the length of the response, which is not in the paper;
    - `one`: a constant, which is not in the paper.
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
        factor = (2 * (log_weight - largest[index])).exp()  # w^2 relative to the group's largest
        if self.norm == "score":  # a response with probability 1 for every token has no gradient
            factor = factor * samples.column("score_norm").double().clamp(min=1e-9)
        elif self.norm == "length":
            factor = factor * samples.lengths.clamp(min=1)
        # Relative to the mean, so that equal rewards give exactly 0.
        centred = rewards - group_mean(rewards, samples.group_ids)
        weighted_sum = sum_by(factor * centred, index, len(sizes))
        baseline = (weighted_sum / sum_by(factor, index, len(sizes)))[index].to(rewards.dtype)
        return (centred - baseline) / (group_std(rewards, samples.group_ids) + self.eps)
