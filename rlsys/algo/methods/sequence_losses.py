"""Policy losses with one weight or ratio per response, beside GSPO: LUSPO, GMPO and VESPO."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import LOG_RATIO_LIMIT, Figures, Gspo, Loss, View, Width


class Luspo(Gspo):
    """GSPO times the length of the response: each of its tokens has the gradient s A, not s A / |y|.

    GSPO's tokens count less in long responses, whose length it so makes shrink. With `reducer: sequence_mean`, as
    for GSPO: the length stands in the loss.
    """

    paper: ClassVar[str] = "LUSPO: length-unbiased sequence policy optimisation"
    evidence: ClassVar[str] = "R"
    clip_low: Width = 2e-3
    """Lower width of the sequence ratio."""
    clip_high: Annotated[float, Field(ge=0)] = 2.5e-3
    """Upper width."""

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        loss, figures = super().__call__(view, prepared)
        return loss * view.batch.lengths[view.batch.ids], figures


class Gmpo(Loss):
    """PPO with the geometric mean of a response's ratios, each clipped by itself before.

    s = exp(mean_t c_t); c_t = log-ratio, at most clip_high where A > 0, at least -clip_low where A < 0. A token that
    is clipped has no gradient, the others s A / |y| with `reducer: sequence_mean`. So wide a clip bites few tokens,
    and one of them moves the mean little.
    """

    paper: ClassVar[str] = "GMPO: geometric-mean policy optimisation (arXiv 2507.20673)"
    evidence: ClassVar[str] = "R"
    per_sequence: ClassVar[bool] = True
    clip_low: Annotated[float, Field(ge=0)] = 0.4
    """Lower width of a token's log-ratio."""
    clip_high: Annotated[float, Field(ge=0)] = 0.4
    """Upper width."""

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        batch, gap = view.batch, view.log_ratio
        lost = ((view.advantages > 0) & (gap > self.clip_high)) | (
            (view.advantages < 0) & (gap < -self.clip_low)
        )
        clipped = torch.where(lost, gap.detach().clamp(-self.clip_low, self.clip_high), gap)
        ratio = (batch.per_sequence(clipped.detach()) / batch.lengths).exp()[batch.ids]
        own = (clipped - clipped.detach()).exp()  # 1, with the token's own gradient
        return -ratio * own * view.advantages, {"clipped": lost}


class Vespo(Loss):
    """A smooth weight of the whole response's ratio: 1 where nothing moved, less and less the further it moves.

    -sg(phi(w)) A logp, phi(w) = exp(lam (1 - w)) w^k, w = the product of the response's ratios; k and lam by the sign
    of A. w at least 1e-8. No correction for mu beside it: take anchor mu, and w is the whole ratio.
    """

    paper: ClassVar[str] = "VESPO: variational sequence-level soft policy optimisation (arXiv 2602.10693)"
    evidence: ClassVar[str] = "R"
    k_positive: Annotated[float, Field(ge=0)] = 2.0
    """Power of w where A >= 0."""
    lam_positive: Annotated[float, Field(gt=0)] = 3.0
    """Decay where A >= 0."""
    k_negative: Annotated[float, Field(ge=0)] = 3.0
    """Power of w where A < 0."""
    lam_negative: Annotated[float, Field(gt=0)] = 2.0
    """Decay where A < 0."""

    def __call__(self, view: View, prepared: Any) -> tuple[Tensor, Figures]:
        batch = view.batch
        log_w = batch.per_sequence(view.log_ratio.detach()).clamp(math.log(1e-8), LOG_RATIO_LIMIT)[batch.ids]
        good = view.advantages >= 0
        k = torch.where(good, self.k_positive, self.k_negative).to(log_w)
        lam = torch.where(good, self.lam_positive, self.lam_negative).to(log_w)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
        return -phi * view.advantages * view.logp, {"clipped": phi == 0}
