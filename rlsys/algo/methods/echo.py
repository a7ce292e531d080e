"""ECHO's loss: a clip that is wider for responses with an uncertain end, and larger advantages for uncertain tokens.

Shapes: T packed tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.losses import Figures, Loss, View, Width
from rlsys.algo.segments import sum_by

Weight = Annotated[float, Field(ge=0)]


def tail_means(batch: Batch, values: Tensor, tail: int) -> Tensor:
    """Compute the mean over the last `tail` trained tokens of each sequence.

    Args:
        batch: the micro-batch.
        values: `[T]`.
        tail: number of tokens.

    Returns:
        The mean of each token's sequence, `[T]`.
    """
    keep = batch.keep.to(values.dtype)
    trained_so_far = keep.cumsum(0)
    lengths = sum_by(keep, batch.ids, batch.sequences)
    starts = lengths.cumsum(0) - lengths
    trained_after = lengths[batch.ids] - (trained_so_far - starts[batch.ids])
    in_tail = batch.keep & (trained_after < tail)
    counts = sum_by(in_tail.to(values.dtype), batch.ids, batch.sequences).clamp(min=1)
    sums = sum_by(torch.where(in_tail, values, torch.zeros_like(values)), batch.ids, batch.sequences)
    return (sums / counts)[batch.ids]


class EchoClip(Loss):
    """PPO's clip with a radius for each response, which is wider for a less confident end.

    The radius is narrow + (wide - narrow) sigmoid(steep (1 - C_tail)). The advantage of a token is
    A (1 + shape (alpha H + beta (1 - C))). H is the entropy at the token, its confidence C is the sum of the squared
    probabilities, and C_tail is the mean of C over the last tokens of the response. The paper does not state its
    measure of confidence, its coefficients and its defaults; rlsys chose them.
    """

    paper: ClassVar[str] = "ECHO: entropy-confidence hybrid optimisation for test-time RL, clip and shaping"
    evidence: ClassVar[str] = "P"
    narrow: Width = 0.1
    """Lower limit of the radius; more confident responses are closer to it."""
    wide: Width = 0.3
    """Upper limit of the radius; less confident responses are closer to it."""
    steep: Weight = 4.0
    """Factor of the lack of confidence in the sigmoid."""
    tail: Annotated[int, Field(gt=0)] = 64
    """Number of trained tokens at the end of a response that determine C_tail."""
    shape: Weight = 0.0
    """Weight of the change of advantages; 0: no change."""
    alpha: Weight = 1.0
    """Weight of the entropy in the change."""
    beta: Weight = 1.0
    """Weight of the lack of confidence in the change."""

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        if self.narrow > self.wide:
            raise ValueError(f"narrow = {self.narrow}: expected at most wide = {self.wide}")
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy", "old", "sum_pi_squared"})

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        batch = view.batch
        confidence = batch.masked(batch.signal("sum_pi_squared"))
        position = torch.sigmoid(self.steep * (1 - tail_means(batch, confidence, self.tail)))
        radius = self.narrow + (self.wide - self.narrow) * position
        uncertainty = self.alpha * batch.masked(batch.signal("entropy")) + self.beta * (1 - confidence)
        advantages = view.advantages * (1 + self.shape * uncertainty)
        ratio, low, high = view.ratio, 1 - radius, 1 + radius
        loss = -torch.minimum(ratio * advantages, torch.clamp(ratio, low, high) * advantages)
        current = ratio.detach()
        clipped = ((advantages > 0) & (current > high)) | ((advantages < 0) & (current < low))
        return loss, {"clipped": clipped, "clip_radius": radius}
