"""LENS in the trainer: selection and weights of responses to purified prompts.

Its group policy is in lens_groups.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.corrections import Correction, CorrectionPlugin
from rlsys.algo.draws import sample_draws
from rlsys.algo.losses import View
from rlsys.algo.segments import group_index, groups_of, sum_by
from rlsys.algo.selectors import Selector


class LensWeights(CorrectionPlugin):
    """Train samples of a cleaned prompt on the original prompt, with a weight w inside the ratio.

    In groups with such samples (after `selectors: [lens]`) r = exp(logp(y | x) - mu(y | sampled prompt)) / w; in all
    others w = 1. w = a for successes of the original prompt, and 1 - a for transferred successes and remaining
    failures, where a is the success rate of the original prompt's samples. w is at least `smallest`, a bound that is
    not in the paper. With a clip, a sample with A > 0 and 1 / w above the upper bound has no gradient.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Smallest w."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def sample_weight(self, samples: Samples) -> Tensor:
        """Return w, `[N]`."""
        transferred, eligible = samples.column("transferred").bool(), samples.eligible
        original, success = ~transferred, samples.reward > self.correct
        transferred_eligible = transferred if eligible is None else transferred & eligible
        index, sizes = group_index(samples.group_ids)
        wins, count, mixed = (
            sum_by(rows.double(), index, len(sizes))[index]
            for rows in (original & success, original, transferred_eligible)
        )
        rate = wins / count.clamp(min=1)
        weight = torch.where(original & success, rate, 1 - rate).clamp(min=self.smallest)
        return torch.where(mixed > 0, weight, torch.ones_like(weight))

    def shift(self, part: Batch, samples: Samples) -> Tensor | None:
        return part.expand(self.sample_weight(samples).log())

    def __call__(self, view: View, update_stats: Any) -> Correction:
        return Correction(torch.ones_like(view.anchor), view.keep)


class Lens(Selector):
    """Replace failures of a prompt by successes of its cleaned version, if cleaning helped.

    If the samples of the cleaned prompt have a higher success rate than the group's own samples, k = min(their
    successes, own failures) of their successes replace k failures, so that the group keeps its size; otherwise only
    the own samples are trained. The other samples of the cleaned prompt are dropped. Use it with `planners: [lens]`
    and `corrections: [lens]`.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    before_advantages: ClassVar[bool] = True
    correct: float = 0.5
    """A sample is a success when its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        success = (samples.reward > self.correct).cpu()
        transferred = samples.column("transferred").bool().cpu()
        out, draws = (~transferred).float(), sample_draws(samples)
        for members in groups_of(samples.group_ids.cpu()):
            original, cleaned = members[~transferred[members]], members[transferred[members]]
            successes, failures = cleaned[success[cleaned]], original[~success[original]]
            if len(successes) * len(original) > (len(original) - len(failures)) * len(cleaned):
                k = min(len(successes), len(failures))
                out[successes[draws[successes].argsort()[:k]]] = 1.0
                out[failures[draws[failures].argsort()[:k]]] = 0.0
        return out.to(samples.rewards.device)
