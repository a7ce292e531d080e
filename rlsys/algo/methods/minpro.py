"""MinPRO: prefix importance ratio."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rlsys.algo.corrections import Correction, CorrectionPlugin, PositiveFloat
from rlsys.algo.losses import View
from rlsys.algo.segments import running_min


class MinPro(CorrectionPlugin):
    """Weight each token by the smallest ratio among the tokens before it, instead of by their product.

    w_t = min_{j < t} exp(logp_j - mu_j), 1 for the first token; the token's own ratio is in the loss. A reading of
    the abstract: whether the authors include j = t, and what they clip, was not found: see
    `inclusive` and `cap`.
    """

    paper: ClassVar[str] = "A Step Back: prefix importance ratio (MinPRO)"
    evidence: ClassVar[str] = "A"
    inclusive: bool = False
    """Take the token itself into the minimum."""
    cap: PositiveFloat | None = 1.0
    """Largest weight; none when null."""

    def __call__(self, view: View, prepared: Any) -> Correction:
        batch, keep = view.batch, view.keep
        lowest = running_min(view.log_total_ratio[keep], batch.ids[keep], inclusive=self.inclusive)
        log_weight = torch.zeros_like(view.anchor).masked_scatter(
            keep, torch.where(lowest.isinf(), 0.0, lowest)
        )
        weight = log_weight.exp()
        return Correction(weight if self.cap is None else weight.clamp(max=self.cap), keep)
