"""GSPO: group sequence policy optimisation (Zheng et al. 2025)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from rlsys.algo.losses import Figures, Loss, View, Width, clipped_surrogate, gradient_is_clipped


class Gspo(Loss):
    """PPO with one ratio per response: the geometric mean of its tokens' ratios, with a narrow clip.

    The ratio of a response y is s = exp(mean_t (logp - anchor)). The ratio of a token is sg(s) exp(logp - sg(logp)),
    where sg stops the gradient, so its gradient is s A / |y| with `reducer: sequence_mean`. The default widths are
    the paper's.
    """

    paper: ClassVar[str] = "Group sequence policy optimisation (Zheng et al. 2025), eq. 5-7"
    evidence: ClassVar[str] = "R"
    per_sequence: ClassVar[bool] = True
    clip_low: Width = 3e-4
    """Clip width of s below 1."""
    clip_high: Annotated[float, Field(ge=0)] = 4e-4
    """Clip width of s above 1."""

    def sample_values(self, view: View) -> Tensor:
        return view.log_ratio.detach()

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        batch = view.batch
        mean = view.over_sample(self.sample_values(view)) / view.sample_lengths
        ratio = mean.exp() * batch.masked(view.logp - view.logp.detach()).exp()
        bounds = (1 - self.clip_low, 1 + self.clip_high)
        clipped = gradient_is_clipped(ratio.detach(), view.advantages, *bounds)
        return clipped_surrogate(ratio, view.advantages, *bounds), {"clipped": clipped}
