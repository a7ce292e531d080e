"""UI-S1: semi-online reinforcement learning with recorded trajectories (arXiv 2509.11543)."""

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
    """Compute episode_weight * N_group(episode) + step_weight * N_step(R) for the returns R of turns.

    N is (x - mean) / (std + eps): N_group over all turns of the group, N_step over the group's turns with the same
    index. For a single turn, N_group is its score and N_step is 0, as in the authors' code. The return restarts at a
    turn that does not match the recorded trajectory.

    Args:
        episode: score of each sample, `[N]`; it counts once for each turn of the sample.
        rewards: rewards of turns, `[N, K]`.
        matches: whether the turn matches the recorded trajectory, `[N, K]` bool.
        counts: number of turns of each sample, `[N]`.
        group_ids: group of each sample, `[N]`.
        gamma: discount factor per turn.
        episode_weight: weight of N_group.
        step_weight: weight of N_step.
        std: whether to divide by the standard deviation.
        eps: added to the standard deviation.

    Returns:
        Advantages of turns, `[N, K]`; 0 after the last turn.
    """
    is_turn = turn_mask(counts, rewards.shape[1])
    returns = turn_returns(rewards, gamma, matches)[is_turn]
    scores = episode[:, None].expand_as(rewards)[is_turn]
    groups = group_ids[:, None].expand_as(rewards)[is_turn]

    def normalise(values: Tensor, ids: Tensor, single_values: Tensor) -> Tensor:
        """Normalise `values` `[n]` over equal `ids` `[n]`; use `single_values` `[n]` where an id occurs once."""
        index, sizes = group_index(ids)
        values = merge_close(values, ids, values.abs(), REWARD_TOLERANCE)
        is_single = (sizes == 1)[index]
        centred = torch.where(is_single, single_values, values - group_mean(values, ids))
        deviation = torch.where(is_single, torch.ones_like(values), group_std(values, ids))
        return centred / (deviation + eps) if std else centred

    turn_ids = _same_turn(group_ids, is_turn)
    total = episode_weight * normalise(scores, groups, scores)
    total = total + step_weight * normalise(returns, turn_ids, torch.zeros_like(returns))
    return torch.zeros_like(rewards).masked_scatter(is_turn, total)


class UiS1(TurnAdvantage):
    """The sample's reward relative to its group, plus returns of turns relative to turns of the same index.

    A = episode_weight * N_group(reward) + step_weight * N_step(R) with R_k = r_k + gamma R_{k+1}, which restarts at a
    turn that deviates from the recorded trajectory. N_group normalises over the group, and counts the reward of a
    sample once for each of its turns, as in the authors' code. N_step normalises over the group's turns of the same
    index.
    """

    paper: ClassVar[str] = "UI-S1: semi-online reinforcement learning (arXiv 2509.11543)"
    evidence: ClassVar[str] = "R"
    gamma: Unit = 0.5
    """Discount factor per turn."""
    episode_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the sample's reward."""
    step_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the turns' returns."""
    std: bool = True
    """Whether normalisation divides by the standard deviation."""
    eps: Eps = 1e-6
    """Added to each standard deviation."""

    def turns(self, samples: Samples) -> Tensor:
        return ui_s1(
            samples.reward, samples.column("turn_rewards"), samples.column("turn_matches"),
            samples.column("turn_counts"), samples.group_ids, gamma=self.gamma,
            episode_weight=self.episode_weight, step_weight=self.step_weight, std=self.std, eps=self.eps,
        )  # fmt: skip
