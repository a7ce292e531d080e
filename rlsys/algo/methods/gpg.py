"""GPG: group policy gradient (arXiv 2504.02546)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, dr_grpo
from rlsys.algo.batch import Samples
from rlsys.algo.segments import group_std


class Gpg(Advantage):
    """alpha (R - mean) / f_norm, where alpha compensates for groups without a gradient.

    Use it with `loss: [reinforce]`. alpha is the number B of samples of the step divided by the number of counted
    samples:
    - `counts: mixed` (the authors): samples in groups whose rewards differ. The authors also sample groups until
      there are beta_th B such samples, with beta_th from 0.4 to 0.6; in rlsys, `planners: [dapo]` replaces groups of
      equal rewards.
    - `counts: rewarded` (verl): samples with a reward other than 0. With rewards of 0 and 1, alpha is then
      1 / (mean reward), which is large for a hard task and small for a learned one, the opposite of its purpose.
    """

    paper: ClassVar[str] = "Group policy gradient (GPG, arXiv 2504.02546), the authors' AMAP-ML/GPG"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    counts: Literal["mixed", "rewarded"] = "mixed"
    """Counted samples. mixed: those in groups whose rewards differ. rewarded: those with a reward other than 0
    (verl)."""
    f_norm: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of the advantages."""

    def __call__(self, samples: Samples) -> Tensor:
        centred = dr_grpo(samples.reward, samples.group_ids)
        if self.counts == "rewarded":
            count = (samples.reward != 0).sum()
        else:
            count = (group_std(samples.reward, samples.group_ids) > 0).sum()
        return len(samples) / count.clamp(min=1) * centred / self.f_norm
