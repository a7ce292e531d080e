"""DART: selection of the turns in which the policy was least certain.

Shapes: N samples of the step, K = MAX_TURNS turns per sample, T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import groups_of
from rlsys.algo.selectors import Selector

MAX_TURNS = 256
"""Number of turns of a sample that are distinguished. The last one includes all later turns."""


def turn_entropies(parts: Sequence[Batch], samples: int, reduce: Reduce) -> Tensor:
    """Compute the mean entropy of each turn, `[N, K]` float64; NaN for a turn without counted tokens.

    Args:
        parts: packed batches of this rank.
        samples: number of samples of the step.
        reduce: sum over ranks.
    """
    device = parts[0].mu.device
    sums = torch.zeros(2, samples * MAX_TURNS, dtype=torch.float64, device=device)
    for part in parts:
        is_counted = part.counted_tokens
        turn_index = part.rows.to(device)[part.ids] * MAX_TURNS + _turn(part)
        entropy = part.signal("entropy").detach().double()
        for k, values in enumerate((entropy, torch.ones_like(entropy))):
            sums[k].index_add_(0, turn_index[is_counted], values[is_counted])
    total, count = reduce(sums)
    return (total / count).view(samples, MAX_TURNS)


def least_sure(entropies: Tensor, group_ids: Tensor, share: float) -> Tensor:
    """Return the mask of each group's ceil(share * n) turns with the largest entropy, `[N, K]` bool.

    n is the number of turns of the group. Further turns with the smallest selected entropy are selected, too.

    Args:
        entropies: mean entropy of each turn, `[N, K]`; NaN for none.
        group_ids: group of each sample, `[N]`.
        share: share of the turns to select.
    """
    selected = torch.zeros_like(entropies, dtype=torch.bool)
    for rows in groups_of(group_ids):
        group_entropies = entropies[rows.to(entropies.device)]
        present = group_entropies[~group_entropies.isnan()]
        if len(present):
            bound = present.sort(descending=True).values[math.ceil(share * len(present) - 1e-9) - 1]
            selected[rows.to(selected.device)] = group_entropies >= bound
    return selected


class UnsureTurns(Selector):
    """Train only the turns of each group in which the policy was least certain.

    These are the turns with the largest mean entropy. The entropy is the trainer's at the start of the step, averaged
    over the trained tokens of the turn. A response without tool calls is one turn. Denominators count all turns. This
    is a reading of the abstract, which does not state the share of turns.
    """

    paper: ClassVar[str] = "DART: decoupled agentic RL training for GUI agents (arXiv 2509.23866)"
    evidence: ClassVar[str] = "A"
    every_sample: ClassVar[bool] = True
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of a group's turns that are trained."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        selected = least_sure(turn_entropies(parts, len(samples), reduce), samples.group_ids, self.share)
        return [
            selected[part.rows.to(selected.device)[part.ids], _turn(part)].to(part.mu)
            * (part.mask > 0).to(part.mu)
            for part in parts
        ]


def _turn(part: Batch) -> Tensor:
    """Return the turn of each token, `[T]`; undefined for tokens that the model did not sample."""
    return part.signal("turns").clamp(min=0, max=MAX_TURNS - 1)
