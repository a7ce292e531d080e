"""GMPO: policy optimisation with the geometric mean of a response's ratios (arXiv 2507.20673)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View


class Gmpo(Loss):
    """PPO with one ratio per response: the geometric mean of its tokens' ratios, each of which is clipped first.

    The ratio of a response y is s = exp(mean_t c_t), where c_t is the log-ratio of a token, limited to at most
    clip_high if A > 0 and to at least -clip_low if A < 0. With `reducer: sequence_mean`, a token has the gradient s A
    / |y|, and none if it is clipped. The clip is wider than PPO's, because one token has little influence on the
    mean.
    """

    paper: ClassVar[str] = "GMPO: geometric-mean policy optimisation (arXiv 2507.20673)"
    evidence: ClassVar[str] = "R"
    per_sequence: ClassVar[bool] = True
    clip_low: Annotated[float, Field(ge=0)] = 0.4
    """Clip width of a token's log-ratio below 0."""
    clip_high: Annotated[float, Field(ge=0)] = 0.4
    """Clip width of a token's log-ratio above 0."""

    def sample_values(self, view: View) -> Tensor:
        return self._clipped(view)[0].detach()

    def _clipped(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the clipped log-ratios, `[T]`, and whether each is clipped and has no gradient, `[T]` bool."""
        gap = view.log_ratio
        is_clipped = ((view.advantages > 0) & (gap > self.clip_high)) | (
            (view.advantages < 0) & (gap < -self.clip_low)
        )
        return torch.where(is_clipped, gap.detach().clamp(-self.clip_low, self.clip_high), gap), is_clipped

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        clipped, is_clipped = self._clipped(view)
        ratio = (view.over_sample(clipped.detach()) / view.sample_lengths).exp()
        token_factor = (clipped - clipped.detach()).exp()  # 1, with the token's own gradient
        return -ratio * token_factor * view.advantages, {"clipped": is_clipped}
