"""Second-wave advantages over groups: robust centres, weights, bonuses, minimum variance.

Shapes: N samples, n of one group. These walk over groups in Python: a step has hundreds of groups, not millions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_index, group_mean, group_std, groups_of, sum_by

NonNegativeFloat = Annotated[float, Field(ge=0)]


def by_group(function: Callable[[Tensor], Tensor], values: Tensor, group_ids: Tensor) -> Tensor:
    """`function` of each group's values `[n]`, put back into `[N]`."""
    out = torch.zeros_like(values)
    for members in groups_of(group_ids):
        out[members] = function(values[members])
    return out


def dense_centre(rewards: Tensor, share: float) -> Tensor:
    """Median of the ceil(share n) sorted neighbours with the smallest range (the lower ones when ranges tie)."""
    k = max(1, math.ceil(share * len(rewards)))
    ordered = rewards.sort().values
    start = int((ordered[k - 1 :] - ordered[: len(ordered) - k + 1]).argmin())
    return middle(ordered[start : start + k])


def middle(ordered: Tensor) -> Tensor:
    """Median of sorted values `[n]`; of an even number, the mean of the two in the middle."""
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


class Gapo(Advantage):
    """(R - Q) / rms(R - Q): Q, the median of the densest part of the group's rewards, ignores outliers.

    Q is the median of the ceil(tau n) sorted rewards with the smallest range; the scale is
    sqrt(sum (R - Q)^2 / (n - 1)). For an even window we take the mean of the two middle values.
    """

    paper: ClassVar[str] = "GAPO: group adaptive policy optimisation"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    tau: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the group in the window."""
    eps: Eps = 1e-6
    """Added to the scale."""

    def __call__(self, samples: Samples) -> Tensor:
        def group(rewards: Tensor) -> Tensor:
            distance = rewards - dense_centre(rewards, self.tau)
            return distance / ((distance**2).sum() / max(len(rewards) - 1, 1)).sqrt().add(self.eps)

        return by_group(group, samples.reward, samples.group_ids)


class McGrpo(Advantage):
    """(R - median) / (MAD + eps) in odd groups of G + 1; the median sample drops out, the others count more for it.

    Non-zero advantages are multiplied by (G + 1) / (number of non-zero), which makes up for the zeros that the mean
    over all samples counts: with `over: active` the reducer would do it a second time. With rewards of 0 and 1 the
    MAD is 0 in every group, so that all mixed groups weigh the same, as in the authors' code. Their eps is 1e-3,
    which makes each advantage a thousand times as large as eps = 1 does and leaves the size of a step to the clipping
    of the gradient. Plan odd groups: `planners: [mc_grpo]`.
    """

    paper: ClassVar[str] = "MC-GRPO: median-centred GRPO"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "R"
    eps: Annotated[float, Field(gt=0)] = 1.0
    """Added to the MAD."""

    def __call__(self, samples: Samples) -> Tensor:
        def group(rewards: Tensor) -> Tensor:
            n = len(rewards)
            if n % 2 == 0:
                raise ValueError(
                    f"mc_grpo needs groups of an odd number of samples, got {n}: rollout.group_size + 1"
                )
            distance = rewards - middle(rewards.sort().values)
            scaled = distance / (middle(distance.abs().sort().values) + self.eps)
            return scaled * n / max(int((scaled != 0).sum()), 1)

        return by_group(group, samples.reward, samples.group_ids)


class Xrpo(Advantage):
    """GRPO, with more weight on correct samples that were unlikely: novelty-sharpened advantages.

    For correct samples, s = mean log-prob of the response, eta = exp(s - mean_g s):
    A += min(max(lam (1 - eta), 0), kappa A). s is the engine's, under the prompt that it sampled from; what was drawn
    after solved problems (planner xrpo) would look likely by that. Such samples get no bonus, and are not in the
    mean. lam and kappa are the paper's.
    """

    paper: ClassVar[str] = "XRPO, advantage sharpening"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "P"
    lam: NonNegativeFloat = 2.5
    """Size of the bonus."""
    kappa: NonNegativeFloat = 0.5
    """Largest bonus as a share of the advantage."""
    correct: float = 0.5
    """A sample is correct when its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def __call__(self, samples: Samples) -> Tensor:
        base = grpo(samples.reward, samples.group_ids)
        score = samples.column("log_likelihood").to(base)
        own = ~samples.column("transferred").bool()
        index, sizes = group_index(samples.group_ids)
        total = sum_by(torch.where(own, score, 0.0).double(), index, len(sizes))
        mean = total / sum_by(own.double(), index, len(sizes)).clamp(min=1)
        eta = (score - mean[index].to(score)).clamp(max=20).exp()
        bonus = torch.minimum((self.lam * (1 - eta)).clamp(min=0), self.kappa * base.clamp(min=0))
        return torch.where((samples.reward > self.correct) & own, base + bonus, base)


class PuzzleCraft(Advantage):
    """(R - mean) times a group weight that is largest for prompts of medium difficulty with diverse answers.

    w = lam d (1 - d) delta^gamma; d = mean reward; delta = entropy of the chosen options over log K, K the number of
    options of a problem ("entropy": for choices; responses without an answer chose none), or (distinct answers - 1)
    / (n - 1) ("distinct": for structured answers).
    """

    paper: ClassVar[str] = "PuzzleCraft: exploration-aware curriculum"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "P"
    lam: NonNegativeFloat = 4.0
    """Weight of a group of reward 1/2 with the most diverse answers."""
    gamma: NonNegativeFloat = 0.5
    """How much diversity counts."""
    diversity: Literal["entropy", "distinct"] = "distinct"
    """How it is measured."""
    options: Annotated[int, Field(ge=2)] | None = None
    """K of "entropy", the number of options that a problem has."""

    @model_validator(mode="after")
    def _options(self) -> Self:
        if (self.options is None) == (self.diversity == "entropy"):
            wanted = "needs the number of options of a problem" if self.options is None else "has no options"
            raise ValueError(f"diversity = {self.diversity} {wanted}, here options = {self.options}")
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    def __call__(self, samples: Samples) -> Tensor:
        mean = group_mean(samples.reward, samples.group_ids)
        measure = self._distinct if self.options is None else self._entropy
        delta = by_group(measure, samples.column("answers").to(mean.dtype), samples.group_ids)
        return (samples.reward - mean) * self.lam * mean * (1 - mean) * delta**self.gamma

    def _distinct(self, answers: Tensor) -> Tensor:
        n = len(answers)
        return torch.full_like(answers, (len(torch.unique(answers)) - 1) / max(n - 1, 1))

    def _entropy(self, answers: Tensor) -> Tensor:
        assert self.options is not None
        _, counts = torch.unique(answers[answers >= 0], return_counts=True)
        p = counts.double() / max(int(counts.sum()), 1)
        delta = min(1.0, float(-(p * p.log()).sum()) / math.log(self.options))
        return torch.full_like(answers, max(delta, 0.0))


class OutcomeExploration(Advantage):
    """GRPO plus c times a bonus for rare final answers, outside the group's normalisation.

    ucb_con: min(1, 1/sqrt(N)) - b0, N = how often this answer came up for this prompt before (negative beyond four
    visits with b0 = 1/2); ucb_mean: the same minus the step's mean; batch: minus the share of siblings with the same
    answer. c was not found in the paper; responses without an answer get no bonus, and are not in the mean.
    """

    paper: ClassVar[str] = "Outcome-based exploration for LLM reasoning"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    evidence: ClassVar[str] = "P"
    mode: Literal["ucb_con", "ucb_mean", "batch"] = "ucb_con"
    """Which bonus."""
    c: float = 0.1
    """Weight of the bonus."""
    b0: float = 0.5
    """What ucb_con takes off."""
    _visits: dict[str, int] = PrivateAttr(default_factory=dict)

    def needs(self) -> frozenset[str]:
        return frozenset({"answers", "prompt_index"})

    def __call__(self, samples: Samples) -> Tensor:
        base = grpo(samples.reward, samples.group_ids)
        answers = samples.column("answers")
        bonus = self._rare_in_group(samples) if self.mode == "batch" else self._rare_in_history(samples)
        if self.mode == "ucb_mean" and (answers >= 0).any():
            bonus = bonus - bonus[answers >= 0].mean()
        return base + self.c * torch.where(answers >= 0, bonus.to(base), torch.zeros_like(base))

    def _rare_in_group(self, samples: Samples) -> Tensor:
        def group(answers: Tensor) -> Tensor:
            same = (answers[:, None] == answers[None, :]).sum(1) - 1
            return -same.to(answers.dtype) / len(answers)

        return by_group(group, samples.column("answers").to(samples.reward.dtype), samples.group_ids)

    def _rare_in_history(self, samples: Samples) -> Tensor:
        pairs = zip(samples.column("prompt_index").tolist(), samples.column("answers").tolist(), strict=True)
        keys = [f"{prompt}:{answer}" for prompt, answer in pairs]
        seen = torch.tensor([self._visits.get(k, 0) for k in keys], dtype=torch.float64)
        for key in keys:
            self._visits[key] = self._visits.get(key, 0) + 1
        bonus = seen.clamp(min=1).rsqrt()
        return (bonus - self.b0 if self.mode == "ucb_con" else bonus).to(samples.reward.device)

    def state_dict(self) -> dict[str, Any]:
        return {"visits": self._visits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._visits = dict(state["visits"])


class MinimumVariance(Advantage):
    """(R - b) / (std + eps) with the baseline b that minimises the variance of off-policy gradients.

    b = sum w^2 |g|^2 R / sum w^2 |g|^2 over the group; w = exp(sum_t old - mu), |g| the norm of the gradient of the
    sample's log-prob. By the weights that would take one backward pass per sample. "score" takes the gradient by the
    logits, exactly: |g|^2 = sum_t (1 - 2 pi_t + sum_v pi_tv^2). "length" and "one" are cheaper proxies of ours: |g|^2
    grows like the response's length, or not at all.
    """

    paper: ClassVar[str] = "VCPO (Stable Asynchrony), optimal off-policy baseline"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    norm: Literal["score", "length", "one"] = "score"
    """What stands for the squared gradient norm."""
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
        if self.norm == "score":  # a response that was certain of every token has no gradient
            share = share * samples.column("score_norm").double().clamp(min=1e-9)
        elif self.norm == "length":
            share = share * samples.lengths.clamp(min=1)
        # Of what is left after the mean, so that equal rewards give exactly 0.
        centred = rewards - group_mean(rewards, samples.group_ids)
        top = sum_by(share * centred, index, len(sizes))
        baseline = (top / sum_by(share, index, len(sizes)))[index].to(rewards.dtype)
        return (centred - baseline) / (group_std(rewards, samples.group_ids) + self.eps)
