"""RoRecomp: rollout response recomposition."""

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

    Baselines are those of the whole group. A share alpha of the correct responses (the shortest) and of the wrong
    ones (the longest) is trained at once; the others go to a queue (rlsys.algo.methods.deferred_samples). The
    defaults of alpha, capacity and max_age are rlsys's.
    """

    paper: ClassVar[str] = "RoRecomp: rollout response recomposition"
    evidence: ClassVar[str] = "N"
    defers: ClassVar[bool] = True
    alpha: Fraction = 0.75
    """Share of the correct (shortest) and of the wrong (longest) responses trained at once."""
    capacity: Annotated[int, Field(gt=0)] = 256
    """Number of stored samples at which an extra update is made."""
    max_age: Annotated[int, Field(ge=0)] = 4
    """Train steps after which a stored sample is dropped."""
    correct: float = 0.5
    """A response is correct when its reward is above this."""

    def store(self) -> DeferredSamples[Any]:
        return DeferredSamples(self.capacity, self.max_age)

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        success, lengths = (samples.reward > self.correct).cpu(), samples.lengths.double().cpu()
        rank, draws = torch.where(success, lengths, -lengths), sample_draws(samples)
        out = torch.zeros(len(samples))
        for members in groups_of(samples.group_ids.cpu()):
            for candidates in (members[success[members]], members[~success[members]]):
                count = -int(-self.alpha * len(candidates) // 1)
                out[candidates[argsort_with_draws(rank[candidates], draws[candidates])[:count]]] = 1.0
        return out.to(samples.rewards.device)
