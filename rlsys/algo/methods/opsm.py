"""Off-policy sequence masking (DeepSeek-V3.2 technical report)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from rlsys.algo.corrections import Correction, CorrectionPlugin
from rlsys.algo.losses import View


class Opsm(CorrectionPlugin):
    """Reject sequences with a negative advantage from which the policy has moved away: mean(mu - logp) > delta.

    For any anchor, the distance is to the policy that sampled, because the policy is always close to a recent anchor.
    """

    paper: ClassVar[str] = "Off-policy sequence masking (DeepSeek-V3.2 technical report)"
    evidence: ClassVar[str] = "R"
    delta: Annotated[float, Field(ge=0)] = 1e-4
    """Largest mean of mu - logp over a sequence with A < 0 that is not rejected, in nats."""

    def __call__(self, view: View, update_stats: Any) -> Correction:
        batch = view.batch
        distance = batch.per_sequence(-view.log_total_ratio) / batch.lengths
        rejected = (distance > self.delta)[batch.ids] & (view.advantages < 0)
        return Correction(torch.ones_like(view.anchor), view.keep & ~rejected)
