"""GPG: group policy gradient (arXiv 2504.02546)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, dr_grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_std


class Gpg(Advantage):
    """alpha (R - mean) / f_norm, where alpha compensates for groups without gradient: use `loss: [reinforce]`.

    `mixed` is the authors' variant: alpha = B / (B - M), if M of the step's B samples are in groups of equal
    rewards. The authors also sample more groups until B - M reaches beta_th B, beta_th from 0.4 to 0.6; in rlsys
    `planners: [dapo]` replaces groups of equal rewards. `rewarded` is verl's: all samples of the step divided by
    those with a reward other than 0. With rewards of 0 and 1 that is 1 / (mean reward): large for a hard task and
    small for a learned one, the opposite of alpha's purpose.
    """

    paper: ClassVar[str] = "Group policy gradient (GPG, arXiv 2504.02546), the authors' AMAP-ML/GPG"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    counts: Literal["mixed", "rewarded"] = "mixed"
    """Samples that alpha counts: mixed: those of groups whose rewards differ. rewarded: those with a reward other
    than 0 (verl)."""
    f_norm: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of the advantages."""

    def __call__(self, samples: Samples) -> Tensor:
        centred = dr_grpo(samples.reward, samples.group_ids)
        if self.counts == "rewarded":
            count = (samples.reward != 0).sum()
        else:
            count = (group_std(samples.reward, samples.group_ids) > 0).sum()
        return len(samples) / count.clamp(min=1) * centred / self.f_norm
