"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlsys.algo.corrections import Level
from rlsys.algo.losses import LOG_RATIO_LIMIT, Figures, Loss, View

ROUNDING = 1e-3
"""Largest excess of a ratio over 1 that may be a rounding error and does not count as capped."""


class Topr(Loss):
    """Tapered off-policy REINFORCE: positive samples have weight 1, negative samples their ratio, at most 1.

    The loss is -A logp where A > 0, else -sg(min(r, 1)) A logp, where sg stops the gradient. r is the ratio to the
    anchor, by default the product over the response as in the paper. ROLL uses the ratio of the token (`level:
    token`) and the sign of the reward instead of the advantage. Corrections weight positive samples, which have no
    ratio, by exp(logp - mu), and negative samples by exp(anchor - mu).
    """

    paper: ClassVar[str] = "TOPR: tapered off-policy REINFORCE (arXiv 2503.14286), eq. 8"
    evidence: ClassVar[str] = "R"
    ratio: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    level: Level = "sequence"
    """Aggregation of the ratio: token, sequence (product) or geometric (geometric mean of the response)."""

    def sample_values(self, view: View) -> Tensor:
        return view.log_ratio.detach()

    @property
    def whole_samples(self) -> bool:
        return self.level != "token"

    def _ratio(self, view: View) -> Tensor:
        """Return the aggregated ratio of each token, `[T]`, detached."""
        if self.level == "token":
            return view.log_ratio.detach().exp()
        total = view.over_sample(self.sample_values(view))
        if self.level == "geometric":
            total = total / view.sample_lengths
        return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def has_ratio(self, view: View) -> Tensor:
        return view.advantages <= 0

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        ratio = self._ratio(view)
        has_ratio = self.has_ratio(view)
        weight = torch.where(has_ratio, ratio.clamp(max=1.0), torch.ones_like(ratio))
        figures = {"capped_share": (has_ratio & (ratio > 1 + ROUNDING)).to(ratio)}
        return -weight * view.advantages * view.logp, figures
