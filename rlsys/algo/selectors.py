"""Selection and weights of samples and tokens. Dropping never changes the denominator, except before the advantages.

Shapes: N samples of the step, T tokens. A selector decides from the table that every rank has, or from sums over
ranks.
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
    """Weights of samples and tokens; 0 drops. Selectors act in order, each on the result of those before it."""

    before_advantages: ClassVar[bool] = False
    """Whether it acts before the advantages: dropped samples are then excluded from baselines and denominators,
    too."""
    defers: ClassVar[bool] = False
    """Whether dropped samples are stored for a later extra update (see rlsys.algo.methods.deferred_samples)."""

    def store(self) -> DeferredSamples[Any]:
        """Return the store of a selector that defers."""
        raise NotImplementedError

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        """Return the weight of each sample, `[N]`. `advantages` `[N]` is None before they are known."""
        return torch.ones(len(samples), device=samples.rewards.device)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        """Return the remaining share of the denominator.

        `weight` `[N]` of samples, `mass` `[N]`: their parts of it.
        """
        return 1.0

    def size_of(self, group: int) -> int | None:
        """Return the remaining samples of a group, if it acts before the advantages.

        None if that depends on the group.
        """
        return None

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        """Return the weight of each token, `[T]` per packed batch of this rank; None for all of them."""
        return None


class OverlongFilter(Selector):
    """Do not train responses that were cut off at the longest length: their outcome is unknown.

    Their rewards stay in the baselines of their groups. Denominators count them, as ROLL's and, over sequences, TRL's
    do; with `denominator: kept` the loss is the mean over the others, as TRL's is over tokens.
    """

    paper: ClassVar[str] = "DAPO, section 3.4: overlong filtering"
    evidence: ClassVar[str] = "R"
    denominator: Literal["kept", "all"] = "all"
    """Denominator of the mean loss: the responses that ended, or all of the step."""

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        return (~samples.column("truncated").bool()).to(samples.rewards)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        mass = mass.double()
        return float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())
