"""UI-S1: semi-online reinforcement learning (arXiv 2509.11543)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Eps
from rlsys.algo.batch import Samples
from rlsys.algo.plugin import REWARD_TOLERANCE
from rlsys.algo.segments import group_index, group_mean, group_std, merge_close
from rlsys.algo.token_advantages import Unit
from rlsys.algo.turn_advantages import TurnAdvantage, _same_turn, turn_mask, turn_returns


def ui_s1(
    episode: Tensor,
    rewards: Tensor,
    matches: Tensor,
    counts: Tensor,
    group_ids: Tensor,
    *,
    gamma: float,
    episode_weight: float,
    step_weight: float,
    std: bool,
    eps: float = 1e-6,
) -> Tensor:
    """Return episode_weight * N_group(episode) + step_weight * N_step(R), `[N, K]`.

    R is the return, which restarts at a turn without a match. N_group is (x - mean) / (std + eps) over all turns of
    the group, N_step the same over turns of the same number. A single turn has 0 in N_step and its score in N_group,
    as in the authors' code.

    Args:
        episode: `[N]`, score of each sample, counted once for each of its turns.
        rewards: `[N, K]`, rewards of turns.
        matches: `[N, K]` bool, whether the turn matches the recorded trajectory.
        counts: `[N]`, number of turns.
        group_ids: `[N]`.
        gamma: discount per turn.
        episode_weight: weight of N_group.
        step_weight: weight of N_step.
        std: divide by the standard deviation.
        eps: added to it.
    """
    is_turn = turn_mask(counts, rewards.shape[1])
    returns = turn_returns(rewards, gamma, matches)[is_turn]
    scores = episode[:, None].expand_as(rewards)[is_turn]
    groups = group_ids[:, None].expand_as(rewards)[is_turn]

    def normed(values: Tensor, ids: Tensor, lone: Tensor) -> Tensor:
        index, sizes = group_index(ids)
        values = merge_close(values, ids, values.abs(), REWARD_TOLERANCE)
        is_single = (sizes == 1)[index]
        centred = torch.where(is_single, lone, values - group_mean(values, ids))
        spread = torch.where(is_single, torch.ones_like(values), group_std(values, ids))
        return centred / (spread + eps) if std else centred

    total = episode_weight * normed(scores, groups, scores)
    total = total + step_weight * normed(returns, _same_turn(group_ids, is_turn), torch.zeros_like(returns))
    return torch.zeros_like(rewards).masked_scatter(is_turn, total)


class UiS1(TurnAdvantage):
    """The episode's score relative to its group, and returns of steps relative to steps of the same number.

    A = episode_weight * N_group(score) + step_weight * N_step(R). R_k = r_k + gamma R_{k+1}, which restarts at a turn
    that deviates from the recorded trajectory. The score is the sample's reward. A group's mean and deviation count a
    score once for each of its turns, as in the authors' code.
    """

    paper: ClassVar[str] = "UI-S1: semi-online reinforcement learning (arXiv 2509.11543)"
    evidence: ClassVar[str] = "R"
    gamma: Unit = 0.5
    """Discount per turn."""
    episode_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the episode's score."""
    step_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the steps' returns."""
    std: bool = True
    """Divide by the standard deviations after subtracting the means."""
    eps: Eps = 1e-6
    """Added to each standard deviation."""

    def turns(self, samples: Samples) -> Tensor:
        return ui_s1(
            samples.reward, samples.column("turn_rewards"), samples.column("turn_matches"),
            samples.column("turn_counts"), samples.group_ids, gamma=self.gamma,
            episode_weight=self.episode_weight, step_weight=self.step_weight, std=self.std, eps=self.eps,
        )  # fmt: skip
