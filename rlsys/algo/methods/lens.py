"""LENS's selector and correction for responses to cleaned prompts. The planner of LENS is in lens_groups.py."""

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
    """Divide ratios by a weight w in groups with samples of a cleaned prompt, which are trained on the original.

    In such groups (after `selectors: [lens]`) the ratio of a response y to the original prompt x is
    exp(logp(y | x) - mu(y | sampled prompt)) / w. With the success rate a of the original prompt's samples, w is
    - a for successes of the original prompt;
    - 1 - a for successes of the cleaned prompt, and for failures;
    - at least `smallest`, a bound that is not in the paper.

    With a clip, a sample with A > 0 and 1 / w above the upper bound has no gradient.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Smallest w."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def sample_weight(self, samples: Samples) -> Tensor:
        """Return the weight w of each sample, `[N]`; 1 in groups without samples of a cleaned prompt."""
        transferred = samples.column("transferred").bool()
        trained_transferred = transferred if samples.eligible is None else transferred & samples.eligible
        original = ~transferred
        original_success = original & (samples.reward > self.correct)
        index, sizes = group_index(samples.group_ids)

        def group_count(rows: Tensor) -> Tensor:
            """Return the number of samples of each sample's group where `rows` `[N]` is true, `[N]`."""
            return sum_by(rows.double(), index, len(sizes))[index]

        rate = group_count(original_success) / group_count(original).clamp(min=1)
        weight = torch.where(original_success, rate, 1 - rate).clamp(min=self.smallest)
        return torch.where(group_count(trained_transferred) > 0, weight, torch.ones_like(weight))

    def shift(self, part: Batch, samples: Samples) -> Tensor | None:
        return part.expand(self.sample_weight(samples).log())

    def __call__(self, view: View, update_stats: Any) -> Correction:
        return Correction(torch.ones_like(view.anchor), view.keep)


class Lens(Selector):
    """Replace failures of a prompt by successes of its cleaned version, if the cleaned version has more success.

    If the samples of the cleaned prompt have a higher success rate than those of the original prompt, k successes of
    the cleaned prompt replace k failures, where k is the smaller one of both numbers. The size of the group does not
    change. All other samples of the cleaned prompt are dropped. Use it with `planners: [lens]` and
    `corrections: [lens]`.
    """

    paper: ClassVar[str] = "LENS: less noise sampling by prompt purification"
    evidence: ClassVar[str] = "P"
    before_advantages: ClassVar[bool] = True
    correct: float = 0.5
    """A sample is a success if its reward is above this."""

    def needs(self) -> frozenset[str]:
        return frozenset({"transferred"})

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        success = (samples.reward > self.correct).cpu()
        transferred = samples.column("transferred").bool().cpu()
        weight = (~transferred).float()
        draws = sample_draws(samples)
        for members in groups_of(samples.group_ids.cpu()):
            original, cleaned = members[~transferred[members]], members[transferred[members]]
            successes, failures = cleaned[success[cleaned]], original[~success[original]]
            if len(successes) * len(original) > (len(original) - len(failures)) * len(cleaned):
                k = min(len(successes), len(failures))
                weight[successes[draws[successes].argsort()[:k]]] = 1.0
                weight[failures[draws[failures].argsort()[:k]]] = 0.0
        return weight.to(samples.rewards.device)
