"""Training on the minority of tokens with high entropy (Wang et al. 2025, Beyond the 80/20 rule)."""

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
"""Spacing in nats of the grid to which entropies are rounded, so that the same tokens of equal responses are
trained."""


MAX_ENTROPY = 32.0
"""Upper bound of the entropy in nats for any vocabulary."""


class TopEntropy(Selector):
    """Train only the share of all tokens with the largest entropy, where the policy was least certain.

    The selection is over all tokens of the step, with entropies at its start; TRL selects from a micro-batch of all
    ranks. The other tokens are removed from all loss terms; TRL does not remove them from the KL to a reference.
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
        counted_entropies = [
            entropy[part.counted_tokens] for entropy, part in zip(entropies, parts, strict=True)
        ]
        local_count = float(sum(len(values) for values in counted_entropies))
        count = reduce(torch.tensor(local_count, dtype=torch.float64, device=parts[0].mu.device))
        dropped = math.ceil((1 - self.share) * (float(count) - 1) - 1e-9)
        bound = threshold(
            counted_entropies, lambda edges, counts, sums: counts <= dropped, -1.0, MAX_ENTROPY, reduce
        )
        return [(entropy > bound).to(entropy) for entropy in entropies]
