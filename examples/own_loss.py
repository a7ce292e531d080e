"""A custom loss: beyond a bound the policy ratio continues with a smaller slope, instead of none.

    rlsys algo check examples/own_loss.py:leaky_clip --kind loss
    rlsys train examples/own_loss.yaml

A loss is a function of a View of packed tokens. It returns the loss of each token, shape [T], and figures that become
metrics. `algo.reducer` sets the weight of each token and the denominator of the sum.
"""

import torch
from torch import Tensor

from rlsys.algo.losses import View


def leaky_clip(
    view: View, update_stats: None, *, bound: float = 0.2, slope: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A f(r) with f(r) = r within [1 - bound, 1 + bound], and `slope` times as steep outside."""
    ratio = view.ratio
    inside = ratio.clamp(1 - bound, 1 + bound)
    outside = (view.advantages > 0) & (ratio > 1 + bound) | (view.advantages < 0) & (ratio < 1 - bound)
    leaky = torch.where(outside, inside + slope * (ratio - inside), ratio)
    return -leaky * view.advantages, {}
