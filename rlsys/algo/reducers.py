"""Reducers: the weight of each token in the loss, and the denominator.

The loss of a step is the sum over tokens of factor(sample) * token loss, divided by `denominator`. Both are known
before any token is masked or dropped. Shapes: N samples of the step.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.plugin import Plugin


class Reduction(NamedTuple):
    """Factor of each sample's tokens, `[N]`, and denominator of the whole step."""

    factor: Tensor
    denominator: float


class Reducer(Plugin):
    """Base of reducers: map the lengths of all samples of the step to factors and a denominator."""

    over: Literal["all", "active"] = "all"
    """Samples in the denominator. all: all samples. active: the samples with an advantage other than 0, for any loss
    terms; all samples if there are none."""
    sample_local: ClassVar[bool] = False
    """Whether the factor of a sample depends on that sample only."""

    def __call__(self, lengths: Tensor, active: Tensor) -> Reduction:
        """Return factors and denominator.

        Args:
            lengths: number of trained tokens of each sample, `[N]`.
            active: whether the sample's advantage is not 0, `[N]` bool.
        """
        return self.reduce(lengths, self._counts(active))

    def _counts(self, active: Tensor) -> Tensor:
        """Return the mask of the samples in the denominator, `[N]` bool.

        If no sample is active, it is true for all: otherwise terms that do not use advantages would be divided by 1.
        """
        return active if self.over == "active" and bool(active.any()) else torch.ones_like(active)

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        """Return factors and denominator.

        Args:
            lengths: number of trained tokens of each sample, `[N]`.
            is_counted: mask of the samples in the denominator, `[N]` bool.
        """
        raise NotImplementedError

    def mass(self, lengths: Tensor, active: Tensor) -> Tensor:
        """Return the contribution of each sample to the denominator, up to a common factor, `[N]`."""
        share = self.share(lengths)
        return share * self._counts(active).to(share)

    def share(self, lengths: Tensor) -> Tensor:
        """Return the contribution of each sample if it is in the denominator, `[N]`: by default 1."""
        return torch.ones(len(lengths))


class TokenMean(Reducer):
    """Mean over all tokens of the step (DAPO), in which long responses have more weight."""

    paper: ClassVar[str] = "DAPO, section 3.3"
    evidence: ClassVar[str] = "R"
    sample_local: ClassVar[bool] = True

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        return Reduction(torch.ones(len(lengths)), max(1.0, float(lengths[is_counted].sum())))

    def share(self, lengths: Tensor) -> Tensor:
        return lengths.float()


class SequenceMean(Reducer):
    """Mean over the tokens of each response, then over responses (GRPO, GSPO)."""

    paper: ClassVar[str] = "DeepSeekMath (GRPO), eq. 3"
    evidence: ClassVar[str] = "R"
    sample_local: ClassVar[bool] = True

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        return Reduction(1 / lengths.clamp(min=1).float().cpu(), max(1.0, float(is_counted.sum())))


class Constant(Reducer):
    """Sum over the tokens of each response divided by a constant length, then mean over responses (Dr. GRPO).

    The denominator does not depend on the lengths of the responses.
    """

    paper: ClassVar[str] = "Dr. GRPO, section 3"
    evidence: ClassVar[str] = "R"
    sample_local: ClassVar[bool] = True
    length: Annotated[int, Field(gt=0)] = 256
    """The constant, usually rollout.max_response_tokens."""

    def reduce(self, lengths: Tensor, is_counted: Tensor) -> Reduction:
        return Reduction(torch.ones(len(lengths)), max(1.0, float(is_counted.sum())) * self.length)
