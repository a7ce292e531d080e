"""Advantages of turns, each of which has a reward and a return: base of MAPO and UI-S1.

Shapes: N samples, K turns of the sample with most, T packed tokens. Rewards and returns `[N, K]` are 0 after a
sample's last turn.
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
    """Compute the returns R_k = r_k + gamma R_{k+1}, `[N, K]`.

    Args:
        rewards: r, `[N, K]`.
        gamma: discount factor.
        goes_on: `[N, K]` bool. Where it is false, R_k = r_k, and the returns of earlier turns exclude R_k. None: true
            everywhere.
    """
    returns = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[:, 0])
    for turn in reversed(range(rewards.shape[1])):
        total = rewards[:, turn] + gamma * later
        continues = torch.ones_like(total, dtype=torch.bool) if goes_on is None else goes_on[:, turn]
        returns[:, turn] = torch.where(continues, total, rewards[:, turn])
        later = torch.where(continues, total, torch.zeros_like(total))
    return returns


def turn_mask(counts: Tensor, width: int) -> Tensor:
    """Return the mask of the turns that exist, `[N, K]` bool.

    Args:
        counts: number of turns of each sample, `[N]`.
        width: K.
    """
    return torch.arange(width, device=counts.device)[None] < counts[:, None]


def _same_turn(group_ids: Tensor, is_turn: Tensor) -> Tensor:
    """Return an id for each existing turn, equal for turns with the same index in the same group.

    Args:
        group_ids: group of each sample, `[N]`.
        is_turn: mask of the turns that exist, `[N, K]` bool.

    Returns:
        `[number of existing turns]`, in row-major order.
    """
    index, _ = group_index(group_ids)
    width = is_turn.shape[1]
    return (index[:, None] * width + torch.arange(width, device=index.device)[None])[is_turn]


class TurnAdvantage(Advantage):
    """Base of estimators that give all tokens of a turn the same advantage.

    The advantage of a sample is the mean over its turns.
    """

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
        token_advantages = []
        for part in parts:
            rows, turns = part.rows[part.ids], part.signal("turns")
            # A token that the model did not sample has turn -1: it gets the last turn's value, which is masked.
            token_advantages.append(part.masked(table.to(part.mu)[rows.to(part.mu.device), turns]))
        return token_advantages
