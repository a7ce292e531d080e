"""Which turns are trained: those in which the policy was least sure (DART).

Shapes: N samples, K turns of the one with most, T packed tokens.
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

MOST_TURNS = 256
"""Turns of a sample that are told apart; the later ones count as one."""


def turn_entropies(parts: Sequence[Batch], samples: int, reduce: Reduce) -> Tensor:
    """Mean entropy of each turn's counted tokens over all ranks, `[N, K]` float64; NaN where there is no turn."""
    device = parts[0].mu.device
    sums = torch.zeros(2, samples * MOST_TURNS, dtype=torch.float64, device=device)
    for part in parts:
        counted = part.counted_tokens
        place = part.rows.to(device)[part.ids] * MOST_TURNS + _turn(part)
        entropy = part.signal("entropy").detach().double()
        for k, values in enumerate((entropy, torch.ones_like(entropy))):
            sums[k].index_add_(0, place[counted], values[counted])
    total, count = reduce(sums)
    return (total / count).view(samples, MOST_TURNS)


def least_sure(entropies: Tensor, group_ids: Tensor, share: float) -> Tensor:
    """The ceil(share * n) of a group's n turns with the largest entropy, and those that equal the last of them;
    `[N, K]` bool."""
    out = torch.zeros_like(entropies, dtype=torch.bool)
    for rows in groups_of(group_ids):
        found = entropies[rows.to(entropies.device)]
        there = found[~found.isnan()]
        if len(there):
            cut = there.sort(descending=True).values[math.ceil(share * len(there) - 1e-9) - 1]
            out[rows.to(out.device)] = found >= cut
    return out


class UnsureTurns(Selector):
    """Train only the turns in which the policy was least sure: of each group's, those with the largest mean entropy.

    As the trainer had it at the start of the step, over the turn's trained tokens. A response that nobody answers is
    one turn. Denominators count all. Our reading of the abstract, which trains on steps of high entropy: the share is
    ours.
    """

    paper: ClassVar[str] = "DART: decoupled agentic RL training for GUI agents (arXiv 2509.23866)"
    evidence: ClassVar[str] = "A"
    every_sample: ClassVar[bool] = True
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of a group's turns that are trained."""

    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def per_token(self, parts: Sequence[Batch], samples: Samples, reduce: Reduce) -> list[Tensor] | None:
        chosen = least_sure(turn_entropies(parts, len(samples), reduce), samples.group_ids, self.share)
        return [
            chosen[part.rows.to(chosen.device)[part.ids], _turn(part)].to(part.mu)
            * (part.mask > 0).to(part.mu)
            for part in parts
        ]


def _turn(part: Batch) -> Tensor:
    """`[T]`; any number where no model sampled the token."""
    return part.signal("turns").clamp(min=0, max=MOST_TURNS - 1)
