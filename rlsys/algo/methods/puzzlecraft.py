"""PuzzleCraft: exploration-aware curriculum."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.advantages import Advantage, NonNegativeFloat, by_group
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_mean


class PuzzleCraft(Advantage):
    """(R - mean) times a group weight that is largest for prompts of medium difficulty with diverse answers.

    w = lam d (1 - d) delta^gamma, where d is the mean reward. For multiple choice ("entropy") delta is the entropy of
    the chosen options divided by log K, with K options per problem; for structured answers ("distinct") it is
    (distinct answers - 1) / (n - 1). Responses without an answer chose no option.
    """

    paper: ClassVar[str] = "PuzzleCraft: exploration-aware curriculum"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "P"
    lam: NonNegativeFloat = 4.0
    """Weight of a group of reward 1/2 with the most diverse answers."""
    gamma: NonNegativeFloat = 0.5
    """Exponent of diversity."""
    diversity: Literal["entropy", "distinct"] = "distinct"
    """Measure of diversity."""
    options: Annotated[int, Field(ge=2)] | None = None
    """K of "entropy", the number of options that a problem has."""

    @model_validator(mode="after")
    def _options(self) -> Self:
        if (self.options is None) == (self.diversity == "entropy"):
            reason = "needs the number of options of a problem" if self.options is None else "has no options"
            raise ValueError(f"diversity = {self.diversity} {reason}: options = {self.options}")
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
