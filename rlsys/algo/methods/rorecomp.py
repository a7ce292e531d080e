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
    """Train the short correct and the long wrong responses of each group now; the others later, in an extra update.

    Baselines are those of the whole group. The share alpha is taken from each end: the shortest of the correct, the
    longest of the wrong. The others go to a first-in-first-out store (rlsys.algo.methods.deferred_samples). The
    paper's values of alpha, of the store's size and of its schedule were not found; rlsys chose these.
    """

    paper: ClassVar[str] = "RoRecomp: rollout response recomposition"
    evidence: ClassVar[str] = "N"
    defers: ClassVar[bool] = True
    alpha: Fraction = 0.75
    """Share of the correct (shortest) and of the wrong (longest) responses trained at once."""
    capacity: Annotated[int, Field(gt=0)] = 256
    """Stored samples that make an extra update."""
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
