"""MAPO: mixed advantage policy optimization for multi-turn dialogue (arXiv 2603.06194)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rlsys.algo.advantages import Eps, grpo, whiten
from rlsys.algo.batch import Samples
from rlsys.algo.token_advantages import Unit
from rlsys.algo.turn_advantages import TurnAdvantage, _same_turn, turn_mask, turn_returns


def mapo(
    rewards: Tensor, counts: Tensor, group_ids: Tensor, gamma: float, weight: float, eps: float = 1e-6
) -> Tensor:
    """Compute weight * N_turn(R) + (1 - weight) * N_batch(R) for the returns R of turns.

    N is (R - mean) / (std + eps): N_turn over the turns with the same index in the same group, N_batch over all turns
    of the step. If each sample has one turn, the result is weight * grpo(r) + (1 - weight) * whiten(r).

    Args:
        rewards: rewards r of turns, `[N, K]`.
        counts: number of turns of each sample, `[N]`.
        group_ids: group of each sample, `[N]`.
        gamma: discount factor per turn.
        weight: weight of N_turn.
        eps: added to each standard deviation.

    Returns:
        Advantages of turns, `[N, K]`; 0 after the last turn.
    """
    is_turn = turn_mask(counts, rewards.shape[1])
    returns = turn_returns(rewards, gamma)[is_turn]
    mixed = weight * grpo(returns, _same_turn(group_ids, is_turn), eps) + (1 - weight) * whiten(returns, eps)
    return torch.zeros_like(rewards).masked_scatter(is_turn, mixed)


class Mapo(TurnAdvantage):
    """Returns of turns, normalised within the group's turns of the same index and over the whole step.

    A = weight * N_turn(R) + (1 - weight) * N_batch(R) with R_k = r_k + gamma R_{k+1}. If each sample has one turn,
    this is weight * grpo + (1 - weight) * whitened rewards. This is a reading of the abstract, which states neither
    gamma nor weight.
    """

    paper: ClassVar[str] = (
        "MAPO: mixed advantage policy optimization for multi-turn dialogue (arXiv 2603.06194)"
    )
    evidence: ClassVar[str] = "A"
    gamma: Unit = 1.0
    """Discount factor per turn."""
    weight: Unit = 0.5
    """Weight of N_turn."""
    eps: Eps = 1e-6
    """Added to each standard deviation."""

    def turns(self, samples: Samples) -> Tensor:
        return mapo(
            samples.column("turn_rewards"), samples.column("turn_counts"), samples.group_ids,
            self.gamma, self.weight, self.eps,
        )  # fmt: skip
