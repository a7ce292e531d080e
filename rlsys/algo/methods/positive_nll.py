"""Cross entropy of the policy's own successes, in addition to a policy loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.losses import Figures, Loss, View
from rlsys.algo.reduction import Reduce


class PositiveNll(Loss):
    """coefficient times the mean of -logp over the tokens of correct responses (VAPO's positive-example loss).

    The mean is over the correct responses of the whole update, with the reducer's weights; with `token_mean` it is
    over their tokens, as in VAPO. NeMo-RL computes the mean over each micro-batch. The term has no ratio, and
    corrections do not apply to it.
    """

    paper: ClassVar[str] = "VAPO (arXiv 2504.05118), eq. 10; NeMo-RL positive_example_nll_weight"
    evidence: ClassVar[str] = "F"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    coefficient: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the mean."""
    correct: float = 0.5
    """A response is correct if its reward is above this."""

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return (rewards > self.correct) & (self.coefficient != 0)

    def prepare(self, parts: Sequence[Batch], anchors: Sequence[Tensor], reduce: Reduce) -> Tensor:
        """Return the sum of the weights of the correct responses' tokens over the update, a scalar."""
        weights = [p.masked(p.signal("weight") * self._correct(p)).double().sum() for p in parts]
        return reduce(torch.stack(weights).sum())

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        batch = view.batch
        share = self._correct(batch) * batch.denominator / torch.where(update_stats > 0, update_stats, 1.0)
        return -self.coefficient * share.to(view.logp) * view.logp, {}

    def _correct(self, part: Batch) -> Tensor:
        """Return 1 for tokens of correct responses and 0 for others, `[T]`."""
        return (part.signal("rewards") > self.correct).to(part.mu)
