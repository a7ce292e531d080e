"""Advantages of turns: each turn of the model has a reward, and a return of its own. MAPO, UI-S1.

Shapes: N samples, K turns of the one with most, T packed tokens. Rewards and returns are `[N, K]`, with 0 behind a
sample's last turn; `counts` `[N]` says how many turns it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from rlsys.algo.advantages import Advantage
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import group_index


def turn_returns(rewards: Tensor, gamma: float, goes_on: Tensor | None = None) -> Tensor:
    """R_k = r_k + gamma R_{k+1}, `[N, K]`. `goes_on` `[N, K]` bool: where it is false, R_k is r_k alone and nothing
    of it is passed on to earlier turns."""
    returns, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for turn in reversed(range(rewards.shape[1])):
        total = rewards[:, turn] + gamma * later
        on = torch.ones_like(total, dtype=torch.bool) if goes_on is None else goes_on[:, turn]
        returns[:, turn] = torch.where(on, total, rewards[:, turn])
        later = torch.where(on, total, torch.zeros_like(total))
    return returns


def turns_there(counts: Tensor, most: int) -> Tensor:
    """Which turns there are, `[N, K]` bool."""
    return torch.arange(most, device=counts.device)[None] < counts[:, None]


def _same_turn(group_ids: Tensor, there: Tensor) -> Tensor:
    """An id for the turns of one number in one group, of each turn that is there."""
    index, _ = group_index(group_ids)
    most = there.shape[1]
    return (index[:, None] * most + torch.arange(most, device=index.device)[None])[there]


class TurnAdvantage(Advantage):
    """Gives each turn an advantage, which all its tokens have; the sample's own is their mean."""

    group_local: ClassVar[bool] = False

    def needs(self) -> frozenset[str]:
        return frozenset({"turn_rewards"})

    def turns(self, samples: Samples) -> Tensor:
        """`[N, K]`."""
        raise NotImplementedError

    def __call__(self, samples: Samples) -> Tensor:
        return self.turns(samples).sum(1) / samples.column("turn_counts").clamp(min=1)

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        counted = samples.column("counted").bool()
        table = torch.zeros_like(samples.column("turn_rewards"))
        table[counted] = self.turns(samples.take(counted))
        out = []
        for part in parts:
            # Where no model sampled the token, its turn is -1: what that reads is masked.
            rows, turns = part.rows[part.ids], part.signal("turns")
            out.append(part.masked(table.to(part.mu)[rows.to(part.mu.device), turns]))
        return out
