"""Which samples and tokens are trained, with which weight. Dropping never changes the denominator, except `before`.

Shapes: N samples of the step, T tokens. What a selector decides, it decides from the table that every rank has, or
from sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.methods.deferred_samples import PutOff
from rlsys.algo.plugin import Plugin
from rlsys.algo.reduction import Reduce

Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Selector(Plugin):
    """Weights of samples and tokens; 0 drops. Selectors act in order: each sees what those before it leave."""

    before: ClassVar[bool] = False
    """Before the advantages: dropped samples were never there, for baselines and denominators too."""
    defers: ClassVar[bool] = False
    """Dropped samples are kept for a later extra update (see rlsys.algo.methods.deferred_samples)."""

    def store(self) -> PutOff[Any]:
        """Of a selector that defers: where to."""
        raise NotImplementedError

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        """Weight of each sample, `[N]`. `advantages` `[N]` is None before they are known."""
        return torch.ones(len(samples), device=samples.rewards.device)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        """Share of the denominator that is left: `weight` `[N]` of samples, `mass` `[N]`: what each counts in it."""
        return 1.0

    def size_of(self, group: int) -> int | None:
        """Of a `before` selector: samples left of a group of so many; None when that depends on the group."""
        return None

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        """Weight of each token, `[T]` per packed batch of this rank; None for all of them."""
        return None


class OverlongFilter(Selector):
    """Do not train responses that were cut off at the longest length: nobody knows how they would have ended.

    Their rewards stay in the baselines of their groups. Denominators count them, as ROLL's and, over sequences, TRL's
    do; with `denominator: kept` the loss is the mean over the others, as TRL's is over tokens.
    """

    paper: ClassVar[str] = "DAPO, section 3.4: overlong filtering"
    evidence: ClassVar[str] = "R"
    denominator: Literal["kept", "all"] = "all"
    """What the loss is a mean over: the responses that ended, or all of the step."""

    def __call__(self, samples: Samples, advantages: Tensor | None) -> Tensor:
        return (~samples.column("truncated").bool()).to(samples.rewards)

    def denominator_share(self, weight: Tensor, mass: Tensor, step: int) -> float:
        if self.denominator == "all" or not mass.any():
            return 1.0
        mass = mass.double()
        return float(mass[(weight != 0).to(mass.device)].sum() / mass.sum())
