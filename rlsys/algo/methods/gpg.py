"""GPG: group policy gradient (arXiv 2504.02546)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, dr_grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_std


class Gpg(Advantage):
    """alpha (R - mean) / f_norm, where alpha makes up for samples that give no gradient: use `loss: [reinforce]`.

    alpha = N / (samples that count), over the step. `rewarded` counts samples whose reward is not 0, as verl does;
    `mixed` those of groups whose rewards differ, which is what second-hand accounts of the paper say (the authors'
    code was not found). With rewards of 0 and 1, `rewarded` is 1 / (mean reward).
    """

    paper: ClassVar[str] = "Group policy gradient (GPG, arXiv 2504.02546); verl core_algos.py"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    counts: Literal["rewarded", "mixed"] = "rewarded"
    """Which samples count."""
    f_norm: Annotated[float, Field(gt=0)] = 1.0
    """Divides the advantages."""

    def __call__(self, samples: Samples) -> Tensor:
        centred = dr_grpo(samples.reward, samples.group_ids)
        if self.counts == "rewarded":
            counted = (samples.reward != 0).sum()
        else:
            counted = (group_std(samples.reward, samples.group_ids) > 0).sum()
        return len(samples) / counted.clamp(min=1) * centred / self.f_norm
