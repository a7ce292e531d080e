"""GPG: group policy gradient (arXiv 2504.02546)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, dr_grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_std


class Gpg(Advantage):
    """alpha (R - mean) / f_norm, where alpha makes up for groups that give no gradient: use `loss: [reinforce]`.

    `mixed`, the authors': alpha = B / (B - M), M of the step's B samples being in groups of equal rewards. They
    also sample further groups until B - M reaches beta_th B, beta_th from 0.4 to 0.6; here `planners: [dapo]` refills
    a step, up to groups that are all mixed. `rewarded` is verl's: the step's samples over those whose reward is not
    0. With rewards of 0 and 1 that is 1 / (mean reward): large while a task is hard, small once it is learned, the
    reverse of what alpha is for.
    """

    paper: ClassVar[str] = "Group policy gradient (GPG, arXiv 2504.02546), the authors' AMAP-ML/GPG"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    counts: Literal["mixed", "rewarded"] = "mixed"
    """Samples that alpha counts: those of groups whose rewards differ, or those whose reward is not 0 (verl)."""
    f_norm: Annotated[float, Field(gt=0)] = 1.0
    """Divides the advantages."""

    def __call__(self, samples: Samples) -> Tensor:
        centred = dr_grpo(samples.reward, samples.group_ids)
        if self.counts == "rewarded":
            count = (samples.reward != 0).sum()
        else:
            count = (group_std(samples.reward, samples.group_ids) > 0).sum()
        return len(samples) / count.clamp(min=1) * centred / self.f_norm
