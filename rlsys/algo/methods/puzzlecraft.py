"""PuzzleCraft: an exploration-aware curriculum by weights of groups."""

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
    """(R - mean) times a weight of the group, which is largest for prompts of medium difficulty with diverse answers.

    The weight is lam d (1 - d) delta^gamma, where d is the mean reward and delta the diversity of the answers:
    - `diversity: entropy`, for multiple choice: the entropy of the chosen options divided by log K, where K is the
      number of options. Responses without an answer do not count.
    - `diversity: distinct`, for other answers: (number of distinct answers - 1) / (n - 1) in a group of n samples.
    """

    paper: ClassVar[str] = "PuzzleCraft: exploration-aware curriculum"
    compares: ClassVar[bool] = True
    evidence: ClassVar[str] = "P"
    lam: NonNegativeFloat = 4.0
    """Factor of the weight. With 4, a group of mean reward 1/2 and the most diverse answers has weight 1."""
    gamma: NonNegativeFloat = 0.5
    """Exponent of the diversity."""
    diversity: Literal["entropy", "distinct"] = "distinct"
    """Measure of diversity."""
    options: Annotated[int, Field(ge=2)] | None = None
    """Number K of options of a problem, for `diversity: entropy` only."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if (self.options is None) == (self.diversity == "entropy"):
            expected = "the number of options of a problem" if self.options is None else "null"
            raise ValueError(
                f"options = {str(self.options).replace('None', 'null')} with diversity = {self.diversity}: expected "
                f"{expected}"
            )
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"answers"})

    def __call__(self, samples: Samples) -> Tensor:
        mean = group_mean(samples.reward, samples.group_ids)
        measure = self._distinct if self.options is None else self._entropy
        delta = by_group(measure, samples.column("answers").to(mean.dtype), samples.group_ids)
        return (samples.reward - mean) * self.lam * mean * (1 - mean) * delta**self.gamma

    def _distinct(self, answers: Tensor) -> Tensor:
        """Return the diversity `distinct` of a group's answers `[n]`, in each entry of `[n]`."""
        n = len(answers)
        return torch.full_like(answers, (len(torch.unique(answers)) - 1) / max(n - 1, 1))

    def _entropy(self, answers: Tensor) -> Tensor:
        """Return the diversity `entropy` of a group's answers `[n]`, in each entry of `[n]`."""
        assert self.options is not None
        _, counts = torch.unique(answers[answers >= 0], return_counts=True)
        p = counts.double() / max(int(counts.sum()), 1)
        delta = min(1.0, float(-(p * p.log()).sum()) / math.log(self.options))
        return torch.full_like(answers, max(delta, 0.0))
