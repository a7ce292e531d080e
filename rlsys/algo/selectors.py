"""Selectors: selection and weights of samples and tokens.

A dropped sample stays in the denominator unless the selector acts before the advantages. A selector uses only the
sample table, which every rank has, and sums over ranks. Shapes: N samples of the step, T tokens of a packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.methods.deferred_samples import DeferredSamples
from rlsys.algo.plugin import Plugin
from rlsys.algo.reduction import Reduce

Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Selector(Plugin):
    """Base of selectors: return weights of samples and tokens, where 0 drops the sample or token.

    A selector receives the samples that the selectors before it keep.
    """

    before_advantages: ClassVar[bool] = False
    """Whether the selector acts before the advantages. Baselines and denominators then exclude dropped samples."""
    defers: ClassVar[bool] = False
    """Whether dropped samples are stored for a later extra update (see rlsys.algo.methods.deferred_samples)."""

    def store(self) -> DeferredSamples[Any]:
        """Return a new queue of deferred samples, for a selector that defers."""
        raise NotImplementedError

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        """Return the weight of each sample, `[N]`.

        Args:
            samples: table of the samples that earlier selectors keep.
            advantages: advantages of the samples, `[N]`; None for a selector with `before_advantages`.
        """
        return torch.ones(len(samples), device=samples.rewards.device)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        """Return the factor of the denominator; by default 1.

        Args:
            weight: weights of all samples of the step from this selector, `[N]`.
            mass: contribution of each sample to the denominator, `[N]`.
            step: number of train steps before this one.
        """
        return 1.0

    def size_of(self, group: int) -> int | None:
        """Return the number of samples of a group that remain for the advantages.

        None if the selector does not act before the advantages, or if the number depends on the samples.

        Args:
            group: number of samples of the group.
        """
        return None

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        """Return the weights of tokens, `[T]` for each packed batch of this rank; None if all weights are 1.

        Args:
            parts: packed batches of this rank.
            samples: the sample table of the step.
            reduce: sum over ranks.
        """
        return None


class OverlongFilter(Selector):
    """Exclude truncated responses from training, because their outcome is unknown.

    Group baselines include their rewards. With `denominator: all` the denominator counts truncated responses, as in
    ROLL and in TRL's mean over sequences. With `denominator: kept` the loss is the mean over the other responses, as
    in TRL's mean over tokens.
    """

    paper: ClassVar[str] = "DAPO, section 3.4: overlong filtering"
    evidence: ClassVar[str] = "R"
    denominator: Literal["kept", "all"] = "all"
    """Responses in the denominator. kept: those that are not truncated. all: all responses of the step."""

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        return (~samples.column("truncated").bool()).to(samples.rewards)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        mass = mass.double()
        return float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())
