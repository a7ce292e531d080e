"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286).

The ratio is taken against `algo.anchor`, whose default, mu, is the policy that sampled.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlsys.algo.corrections import Level
from rlsys.algo.losses import LOG_RATIO_LIMIT, Figures, Loss, View

ROUNDING = 1e-3
"""Excess of a ratio over 1 that may be rounding and does not count as capped."""


class Topr(Loss):
    """Tapered off-policy REINFORCE: positive samples have full weight, negative ones at most their ratio.

    -A logp where A > 0, else -sg(min(r, 1)) A logp. r is the product over the response, as in the paper; ROLL uses
    each token's ratio (`level: token`) and the sign of the reward instead of the advantage. Corrections weight
    positive samples, which have no ratio, by exp(logp - mu), and negative ones by exp(anchor - mu).
    """

    paper: ClassVar[str] = "TOPR: tapered off-policy REINFORCE (arXiv 2503.14286), eq. 8"
    evidence: ClassVar[str] = "R"
    ratio: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    level: Level = "sequence"
    """Unit of the ratio."""

    def sample_values(self, view: View) -> Tensor:
        return view.log_ratio.detach()

    @property
    def whole_samples(self) -> bool:
        return self.level != "token"

    def _ratio(self, view: View) -> Tensor:
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
        bad = view.advantages <= 0
        weight = torch.where(bad, ratio.clamp(max=1.0), torch.ones_like(ratio))
        figures = {"capped_share": (bad & (ratio > 1 + ROUNDING)).to(ratio)}
        return -weight * view.advantages * view.logp, figures
