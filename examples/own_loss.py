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
    """Return the loss -A f(r) of each token: f(r) = r within the clip range, and `slope` times as steep outside.

    Args:
        view: packed tokens; `ratio` and `advantages` have the shape [T].
        update_stats: unused.
        bound: half the width of the clip range, [1 - bound, 1 + bound].
        slope: factor of the gradient outside the range, in place of PPO's 0.

    Returns:
        The loss, [T], and no figures.
    """
    ratio = view.ratio
    inside = ratio.clamp(1 - bound, 1 + bound)
    outside = (view.advantages > 0) & (ratio > 1 + bound) | (view.advantages < 0) & (ratio < 1 - bound)
    leaky = torch.where(outside, inside + slope * (ratio - inside), ratio)
    return -leaky * view.advantages, {}
