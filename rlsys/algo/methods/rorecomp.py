"""RoRecomp: rollout response recomposition, which separates responses by correctness and length."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.draws import argsort_with_draws, sample_draws
from rlsys.algo.methods.deferred_samples import DeferredSamples
from rlsys.algo.segments import groups_of
from rlsys.algo.selectors import Selector
from rlsys.config.section import Fraction


class RoRecomp(Selector):
    """Train the short correct and the long wrong responses of each group, and the others later in an extra update.

    The selector trains a share alpha of the correct responses, the shortest, and the same share of the wrong ones,
    the longest. It puts the others in a queue (rlsys.algo.methods.deferred_samples). Baselines are those of the whole
    group. rlsys chose the defaults of alpha, capacity and max_age.
    """

    paper: ClassVar[str] = "RoRecomp: rollout response recomposition"
    evidence: ClassVar[str] = "N"
    defers: ClassVar[bool] = True
    alpha: Fraction = 0.75
    """Share of the correct and of the wrong responses that are not deferred."""
    capacity: Annotated[int, Field(gt=0)] = 256
    """Number of deferred samples of an extra update."""
    max_age: Annotated[int, Field(ge=0)] = 4
    """Largest age of a deferred sample in train steps. Older samples are dropped."""
    correct: float = 0.5
    """A response is correct if its reward is above this."""

    def store(self) -> DeferredSamples[Any]:
        return DeferredSamples(self.capacity, self.max_age)

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        success = (samples.reward > self.correct).cpu()
        lengths = samples.lengths.double().cpu()
        rank = torch.where(success, lengths, -lengths)
        draws = sample_draws(samples)
        weight = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            for candidates in (members[success[members]], members[~success[members]]):
                count = -int(-self.alpha * len(candidates) // 1)  # rounded up
                order = argsort_with_draws(rank[candidates], draws[candidates])
                weight[candidates[order[:count]]] = 1.0
        return weight.to(samples.rewards.device)
