"""VESPO: variational sequence-level soft policy optimisation (arXiv 2602.10693)."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import LOG_RATIO_LIMIT, Figures, Loss, View


class Vespo(Loss):
    """-sg(phi(w)) A logp, where sg stops the gradient: a smooth weight from the ratio w of the whole response.

    phi(w) = exp(lam (1 - w)) w^k, which is 1 for w = 1. w is the product of the response's ratios, at least 1e-8; k
    and lam depend on the sign of A. Use anchor mu and no correction, because w then is the whole ratio to the policy
    that sampled.
    """

    paper: ClassVar[str] = "VESPO: variational sequence-level soft policy optimisation (arXiv 2602.10693)"
    evidence: ClassVar[str] = "R"
    k_positive: Annotated[float, Field(ge=0)] = 2.0
    """Exponent k where A >= 0."""
    lam_positive: Annotated[float, Field(gt=0)] = 3.0
    """Decay rate lam where A >= 0."""
    k_negative: Annotated[float, Field(ge=0)] = 3.0
    """Exponent k where A < 0."""
    lam_negative: Annotated[float, Field(gt=0)] = 2.0
    """Decay rate lam where A < 0."""

    def sample_values(self, view: View) -> Tensor:
        return view.log_ratio.detach()

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        log_w = view.over_sample(self.sample_values(view)).clamp(math.log(1e-8), LOG_RATIO_LIMIT)
        is_positive = view.advantages >= 0
        k = torch.where(is_positive, self.k_positive, self.k_negative).to(log_w)
        lam = torch.where(is_positive, self.lam_positive, self.lam_negative).to(log_w)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
        return -phi * view.advantages * view.logp, {"clipped": phi == 0}
