"""Weight of each token in the loss, and the divisor of the sum. Both are fixed before any token is masked or dropped.

The objective is sum over tokens of factor(sample) * token loss, divided by `denominator`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.plugin import Plugin


class Reduction(NamedTuple):
    """factor `[N]` of each sample's tokens, and the denominator of the whole step."""

    factor: Tensor
    denominator: float


class Reducer(Plugin):
    """Base of reducers: map the lengths of all samples of the step to a factor of each sample's tokens."""

    over: Literal["all", "active"] = "all"
    """Samples in the denominator: all, or active: those with an advantage other than 0, independent of the loss
    terms; if no sample has one, all."""
    sample_local: ClassVar[bool] = False
    """Whether a sample's factor depends on that sample only."""

    def __call__(self, lengths: Tensor, active: Tensor) -> Reduction:
        """Return factors and denominator. `lengths` `[N]`: trained tokens; `active` `[N]` bool: advantages other
        than 0."""
        return self.reduce(lengths, self._counts(active))

    def _counts(self, active: Tensor) -> Tensor:
        """Return the samples in the denominator.

        If none is active, these are all: otherwise terms that do not use advantages would be divided by 1.
        """
        return active if self.over == "active" and bool(active.any()) else torch.ones_like(active)

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        """Return factors and denominator. `is_counted` `[N]` bool: samples in the denominator."""
        raise NotImplementedError

    def mass(self, lengths: Tensor, active: Tensor) -> Tensor:
        """Return the contribution of each sample to the denominator, up to a common factor, `[N]`."""
        share = self.share(lengths)
        return share * self._counts(active).to(share)

    def share(self, lengths: Tensor) -> Tensor:
        """Return the contribution of each sample if it is counted, `[N]`: 1, or its tokens."""
        return torch.ones(len(lengths))


class TokenMean(Reducer):
    """Equal weight for every token of the step (DAPO), so that long responses have more weight."""

    paper: ClassVar[str] = "DAPO, section 3.3"
    evidence: ClassVar[str] = "R"
    sample_local: ClassVar[bool] = True

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        return Reduction(torch.ones(len(lengths)), max(1.0, float(lengths[is_counted].sum())))

    def share(self, lengths: Tensor) -> Tensor:
        return lengths.float()


class SequenceMean(Reducer):
    """The mean over each response's tokens, then over responses (GRPO, GSPO)."""

    paper: ClassVar[str] = "DeepSeekMath (GRPO), eq. 3"
    evidence: ClassVar[str] = "R"
    sample_local: ClassVar[bool] = True

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        return Reduction(1 / lengths.clamp(min=1).float().cpu(), max(1.0, float(is_counted.sum())))


class Constant(Reducer):
    """The sum over tokens divided by a constant length, then the mean over responses (Dr. GRPO).

    The denominator is known before any response is finished.
    """

    paper: ClassVar[str] = "Dr. GRPO, section 3"
    evidence: ClassVar[str] = "R"
    sample_local: ClassVar[bool] = True
    length: Annotated[int, Field(gt=0)] = 256
    """The constant, usually rollout.max_response_tokens."""

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        return Reduction(torch.ones(len(lengths)), max(1.0, float(is_counted.sum())) * self.length)
