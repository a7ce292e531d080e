"""Generalised advantage estimation over tokens or turns, with a lambda that may depend on the response's length.

Shapes: T packed tokens, n trained tokens, K timesteps (trained tokens or turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.advantages import Advantage
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import discounted_suffix_sum, sum_by
from rlsys.algo.token_advantages import Unit, last_token, turn_ends, whiten_tokens


def gae(rewards: Tensor, values: Tensor, ids: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """Compute generalised advantage estimates (Schulman et al. 2016, eq. 16) within each sequence.

    A_t = sum_l (gamma lam)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t; V after the last timestep is 0.

    Args:
        rewards: r, `[K]`.
        values: V, `[K]`.
        ids: index of each timestep's sequence, `[K]`.
        gamma: discount factor.
        lam: a number, or `[K]` with the same number for all timesteps of a sequence.

    Returns:
        A, `[K]`.
    """
    following = torch.zeros_like(values)
    following[:-1] = torch.where(ids[1:] == ids[:-1], values[1:], torch.zeros_like(values[1:]))
    return discounted_suffix_sum(rewards + gamma * following - values, ids, gamma * lam)


class Timesteps(NamedTuple):
    """Timesteps of the trained tokens.

    Attributes:
        step: Timestep of each trained token, `[n]`.
        is_first: Whether the token is the first of its timestep, `[n]` bool.
    """

    step: Tensor
    is_first: Tensor


def timesteps(part: Batch, unit: Literal["token", "turn"]) -> Timesteps:
    """Return the timesteps of the trained tokens: one for each token, or one for each turn.

    A turn is a run of consecutive trained tokens of a sequence.
    """
    positions = part.keep.nonzero().flatten()
    ids = part.ids[part.keep]
    is_first = torch.ones_like(positions, dtype=torch.bool)
    if unit == "turn":
        is_first[1:] = (positions[1:] != positions[:-1] + 1) | (ids[1:] != ids[:-1])
    return Timesteps(is_first.long().cumsum(0) - 1, is_first)


class Gae(Advantage):
    """PPO's advantages from a critic: GAE(gamma, lambda), whitened over all tokens.

    The reward is on the last token. The estimator also computes the targets of the critic, advantage + value, for the
    loss term `value`.

    - `timestep: turn` (AReaL): a timestep is a turn of the policy. Its reward is the sum over its tokens, and its
      value is that of its first token. All its tokens have its advantage and its return.
    - `alpha` (VAPO): lambda grows with the number l of timesteps of the response, as 1 - 1 / (alpha l), at least 0.
    - `critic_lam` (VAPO, VC-PPO): the critic's targets have another lambda; with 1 they are the returns.

    The value after the last token is 0 even for a truncated response, as in verl; AReaL uses the value of the last
    token. Each sequence of a sample is a separate episode, with the sample's reward on the last token.
    """

    paper: ClassVar[str] = (
        "High-dimensional continuous control using GAE (Schulman et al. 2016), eq. 16; VAPO (arXiv 2504.05118)"
    )
    evidence: ClassVar[str] = "R"
    of_samples: ClassVar[bool] = False
    gamma: Unit = 1.0
    """Discount factor per timestep."""
    lam: Unit = 0.95
    """Lambda. 1: full returns. 0: one timestep ahead."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Parameter of the lambda that depends on the length; null: `lam` for all. Responses of up to 1 / alpha timesteps
    have lambda 0. VAPO uses 0.05 for responses of thousands of tokens."""
    critic_lam: Unit | None = None
    """Lambda of the critic's targets; null: that of the advantages."""
    timestep: Literal["token", "turn"] = "token"
    """Timestep of gamma and lambda: a token, or a turn of the policy."""
    rewards: Literal["response", "turns"] = "response"
    """Rewards. response: one for the response, on its last token. turns: one for each turn, on the turn's last
    token."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty old - ref in the reward of each token."""
    whiten: bool = True
    """Whether advantages are whitened over all tokens of the step."""

    def needs(self) -> frozenset[str]:
        needs = {"values"} | ({"old", "ref"} if self.beta else set())
        return frozenset(needs | ({"turn_rewards"} if self.rewards == "turns" else set()))

    def __call__(self, samples: Samples) -> Tensor:
        return samples.reward

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        estimates = []
        for part in parts:
            rewards = self._rewards(part, advantages, samples)
            if self.beta:
                rewards = rewards - self.beta * part.masked(part.signal("old") - part.signal("ref"))
            estimate, part.returns = self._estimate(part, rewards)
            estimates.append(estimate)
        return whiten_tokens(estimates, parts, reduce) if self.whiten else estimates

    def _rewards(self, part: Batch, advantages: Tensor, samples: Samples) -> Tensor:
        """Return the reward of each token, `[T]`, without the KL penalty; 0 for tokens without a reward."""
        if self.rewards == "response":
            return torch.where(last_token(part), part.expand(advantages), torch.zeros_like(part.mu))
        table = samples.column("turn_rewards").to(part.mu)
        # A token that the model did not sample has turn -1: it gets the last turn's value, which is masked.
        turn_rewards = table[part.rows.to(table.device)[part.ids], part.signal("turns")]
        return torch.where(turn_ends(part), turn_rewards, torch.zeros_like(part.mu))

    def _estimate(self, part: Batch, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Return the advantages and the critic's targets, `[T]` each; 0 where masked."""
        steps, keep = timesteps(part, self.timestep), part.keep
        values = part.signal("values").detach()[keep][steps.is_first]
        ids = part.ids[keep][steps.is_first]
        step_rewards = sum_by(rewards[keep], steps.step, len(ids))
        lam = self._lambda(ids, part.sequences).to(values)
        estimates = target_estimates = gae(step_rewards, values, ids, self.gamma, lam)
        if self.critic_lam is not None:
            target_estimates = gae(step_rewards, values, ids, self.gamma, self.critic_lam)

        def to_tokens(x: Tensor) -> Tensor:
            """Return for each token the entry of its timestep in `x` `[K]`, as `[T]`."""
            return torch.zeros_like(part.mu).masked_scatter(keep, x[steps.step])

        return to_tokens(estimates), to_tokens(target_estimates + values)

    def _lambda(self, ids: Tensor, sequences: int) -> Tensor:
        """Return the lambda of each timestep, `[K]` float64, from the number of timesteps of its sequence."""
        if self.alpha is None:
            return torch.full(ids.shape, self.lam, dtype=torch.float64, device=ids.device)
        lengths = torch.bincount(ids, minlength=sequences).double()[ids]
        return (1 - 1 / (self.alpha * lengths)).clamp(min=0)
