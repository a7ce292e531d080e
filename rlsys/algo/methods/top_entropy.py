"""High-entropy minority tokens (Wang et al. 2025, Beyond the 80/20 rule)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce, threshold
from rlsys.algo.selectors import Selector

GRID = 2.0**-10
"""Resolution of entropies in nats: tokens of equal responses in a group are all kept or all dropped."""


MOST_NATS = 32.0
"""Upper bound of the entropy in nats for any vocabulary."""


class TopEntropy(Selector):
    """Train only the share of all tokens with the largest entropy, where the policy was least certain.

    The quantile is over the whole step, with entropies at its start; TRL uses that of a micro-batch over ranks. The
    other tokens are removed from all loss terms, including the KL to a reference, in which TRL keeps them.
    Denominators count all tokens.
    """

    paper: ClassVar[str] = "Beyond the 80/20 rule: high-entropy minority tokens (Wang et al. 2025)"
    evidence: ClassVar[str] = "R"
    every_sample: ClassVar[bool] = True
    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the tokens that are trained."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        entropies = [(part.masked(part.signal("entropy").detach()) / GRID).round() * GRID for part in parts]
        trained = [e[p.counted_tokens] for e, p in zip(entropies, parts, strict=True)]
        count = torch.tensor(
            float(sum(len(t) for t in trained)), dtype=torch.float64, device=parts[0].mu.device
        )
        dropped = math.ceil((1 - self.share) * (float(reduce(count)) - 1) - 1e-9)
        bound = threshold(trained, lambda edges, counts, sums: counts <= dropped, -1.0, MOST_NATS, reduce)
        return [(entropy > bound).to(entropy) for entropy in entropies]
