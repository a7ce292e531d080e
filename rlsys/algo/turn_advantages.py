"""Advantages of turns, each of which has a reward and a return: base of MAPO and UI-S1.

Shapes: N samples, K turns of the sample with most, T packed tokens. Rewards and returns are `[N, K]`, with 0 after a
sample's last turn; `counts` `[N]` is its number of turns.
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
    """Return R_k = r_k + gamma R_{k+1}, `[N, K]`.

    `goes_on` `[N, K]` bool: where it is false, R_k = r_k, and the returns of earlier turns exclude R_k.
    """
    returns, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for turn in reversed(range(rewards.shape[1])):
        total = rewards[:, turn] + gamma * later
        on = torch.ones_like(total, dtype=torch.bool) if goes_on is None else goes_on[:, turn]
        returns[:, turn] = torch.where(on, total, rewards[:, turn])
        later = torch.where(on, total, torch.zeros_like(total))
    return returns


def turn_mask(counts: Tensor, width: int) -> Tensor:
    """Return the mask of the turns that exist, `[N, K]` bool."""
    return torch.arange(width, device=counts.device)[None] < counts[:, None]


def _same_turn(group_ids: Tensor, is_turn: Tensor) -> Tensor:
    """Return for each existing turn an id that turns of the same number in the same group share."""
    index, _ = group_index(group_ids)
    width = is_turn.shape[1]
    return (index[:, None] * width + torch.arange(width, device=index.device)[None])[is_turn]


class TurnAdvantage(Advantage):
    """Base of estimators with one advantage per turn, for all its tokens; that of the sample is their mean."""

    group_local: ClassVar[bool] = False

    def needs(self) -> frozenset[str]:
        return frozenset({"turn_rewards"})

    def turns(self, samples: Samples) -> Tensor:
        """Return the advantages of turns, `[N, K]`."""
        raise NotImplementedError

    def __call__(self, samples: Samples) -> Tensor:
        return self.turns(samples).sum(1) / samples.column("turn_counts").clamp(min=1)

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        eligible = samples.column("eligible").bool()
        table = torch.zeros_like(samples.column("turn_rewards"))
        table[eligible] = self.turns(samples.take(eligible))
        out = []
        for part in parts:
            # Where no model sampled the token, its turn is -1: what that reads is masked.
            rows, turns = part.rows[part.ids], part.signal("turns")
            out.append(part.masked(table.to(part.mu)[rows.to(part.mu.device), turns]))
        return out
