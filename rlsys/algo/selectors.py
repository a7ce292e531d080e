"""Selection and weights of samples and tokens. A dropped sample stays in the denominator, except before the
advantages.

Shapes: N samples of the step, T tokens. A selector uses only the table, which every rank has, and sums over ranks.
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
    """Base of selectors: weights of samples and tokens, where 0 drops; each acts on the result of those before it."""

    before_advantages: ClassVar[bool] = False
    """Whether it acts before the advantages: baselines and denominators then exclude dropped samples."""
    defers: ClassVar[bool] = False
    """Whether dropped samples are stored for a later extra update (see rlsys.algo.methods.deferred_samples)."""

    def store(self) -> DeferredSamples[Any]:
        """Return a new queue of deferred samples, for a selector that defers."""
        raise NotImplementedError

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        """Return the weight of each sample, `[N]`. `advantages` `[N]` is None before they are known."""
        return torch.ones(len(samples), device=samples.rewards.device)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        """Return the share of the denominator that remains.

        Args:
            weight: `[N]`, weights of samples.
            mass: `[N]`, contribution of each sample to the denominator.
            step: train steps before this one.
        """
        return 1.0

    def size_of(self, group: int) -> int | None:
        """Return the number of remaining samples of a group, if the selector acts before the advantages.

        None if it depends on the group's samples.
        """
        return None

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        """Return the weight of each token, `[T]` for each packed batch of this rank; None for weights of 1."""
        return None


class OverlongFilter(Selector):
    """Exclude truncated responses from training, because their outcome is unknown.

    Their rewards stay in the baselines of their groups. Denominators count them, as in ROLL and, over sequences, in
    TRL; with `denominator: kept` the loss is the mean over the other responses, as in TRL over tokens.
    """

    paper: ClassVar[str] = "DAPO, section 3.4: overlong filtering"
    evidence: ClassVar[str] = "R"
    denominator: Literal["kept", "all"] = "all"
    """Denominator of the mean loss: kept: the responses that are not truncated. all: all of the step."""

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        return (~samples.column("truncated").bool()).to(samples.rewards)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        mass = mass.double()
        return float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())
