"""Advantages of turns: each turn of the model has a reward, and a return of its own. MAPO, UI-S1.

Shapes: N samples, K turns of the one with most, T packed tokens. Rewards and returns are `[N, K]`, with 0 behind a
sample's last turn; `counts` `[N]` says how many turns it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, grpo, whiten
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.methods.token_advantages import Unit
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import group_index, group_mean, group_std


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


def mapo(
    rewards: Tensor, counts: Tensor, group_ids: Tensor, gamma: float, weight: float, eps: float = 1e-6
) -> Tensor:
    """weight * N_turn(R) + (1 - weight) * N_batch(R), R the turns' returns; `[N, K]`.

    N_turn: (R - mean) / (std + eps) over the group's turns of the same number. N_batch: the same over all turns of
    the step. With one turn each: weight * grpo(r) + (1 - weight) * whiten(r).
    """
    there = turns_there(counts, rewards.shape[1])
    returns = turn_returns(rewards, gamma)[there]
    mixed = weight * grpo(returns, _same_turn(group_ids, there), eps) + (1 - weight) * whiten(returns, eps)
    return torch.zeros_like(rewards).masked_scatter(there, mixed)


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
    """episode_weight * N_group(episode) + step_weight * N_step(R), `[N, K]`; R restarts where a turn did not match.

    `episode` `[N]`: a score for each sample, counted once for each of its turns. N_group: (x - mean) / (std + eps)
    over all turns of the group; N_step: over those of the same number. A turn that is alone has 0 in N_step and, as
    the authors have it, its score itself in N_group.
    """
    there = turns_there(counts, rewards.shape[1])
    returns = turn_returns(rewards, gamma, matches)[there]
    scores = episode[:, None].expand_as(rewards)[there]
    groups = group_ids[:, None].expand_as(rewards)[there]

    def normed(values: Tensor, ids: Tensor, lone: Tensor) -> Tensor:
        index, sizes = group_index(ids)
        alone = (sizes == 1)[index]
        centred = torch.where(alone, lone, values - group_mean(values, ids))
        spread = torch.where(alone, torch.ones_like(values), group_std(values, ids))
        return centred / (spread + eps) if std else centred

    total = episode_weight * normed(scores, groups, scores)
    total = total + step_weight * normed(returns, _same_turn(group_ids, there), torch.zeros_like(returns))
    return torch.zeros_like(rewards).masked_scatter(there, total)


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
            rows, turns = part.rows[part.ids], part.signal("turns").clamp(min=0)
            out.append(part.masked(table.to(part.mu)[rows.to(part.mu.device), turns]))
        return out


class Mapo(TurnAdvantage):
    """Monte Carlo returns of turns, normalised twice and mixed: within the group's turns of the same number, and over
    all turns of the step.

    A = weight * N_turn(R) + (1 - weight) * N_batch(R), R_k = r_k + gamma R_{k+1}. A reading of the abstract: gamma
    and weight are ours. With one turn a sample it is weight * grpo + (1 - weight) * whitened rewards.
    """

    paper: ClassVar[str] = (
        "MAPO: mixed advantage policy optimization for multi-turn dialogue (arXiv 2603.06194)"
    )
    evidence: ClassVar[str] = "A"
    gamma: Unit = 1.0
    """Discount per turn."""
    weight: Unit = 0.5
    """Share of what is normalised within turns of the same number."""
    eps: Eps = 1e-6
    """Added to each standard deviation."""

    def turns(self, samples: Samples) -> Tensor:
        return mapo(
            samples.column("turn_rewards"), samples.column("turn_counts"), samples.group_ids,
            self.gamma, self.weight, self.eps,
        )  # fmt: skip


class UiS1(TurnAdvantage):
    """The episode's score in its group, and the returns of steps in its group's steps of one number.

    A = episode_weight * N_group(score) + step_weight * N_step(R). R_k = r_k + gamma R_{k+1}, which restarts at a turn
    that did not do as the trajectory that it follows. The score is the sample's reward. A group's mean and deviation
    count a score once for each of its turns, as the authors' code does.
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
    """Divide by the standard deviations, not only take off the means."""
    eps: Eps = 1e-6
    """Added to each standard deviation."""

    def turns(self, samples: Samples) -> Tensor:
        return ui_s1(
            samples.reward, samples.column("turn_rewards"), samples.column("turn_matches"),
            samples.column("turn_counts"), samples.group_ids, gamma=self.gamma,
            episode_weight=self.episode_weight, step_weight=self.step_weight, std=self.std, eps=self.eps,
        )  # fmt: skip
