"""Generalised advantage estimation: by token or by turn, with one lambda for all or one for each length.

Shapes: T packed tokens, K timesteps of trained tokens (a token each, or a turn each), S sequences.
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
    """Return A_t = sum_l (gamma lam)^l delta_{t+l} within each sequence, delta_t = r_t + gamma V_{t+1} - V_t, `[T]`.

    Generalised advantage estimation (Schulman et al. 2016, eq. 16). V after the last token is 0. `lam` is a number,
    or `[T]` with the same value for all tokens of a sequence.
    """
    following = torch.zeros_like(values)
    following[:-1] = torch.where(ids[1:] == ids[:-1], values[1:], torch.zeros_like(values[1:]))
    return discounted_suffix_sum(rewards + gamma * following - values, ids, gamma * lam)


class Timesteps(NamedTuple):
    """Timesteps of GAE. `of`: the timestep of each trained token; `first`: whether the token starts a timestep."""

    of: Tensor
    first: Tensor


def timesteps(part: Batch, unit: Literal["token", "turn"]) -> Timesteps:
    """Return the timesteps of the trained tokens: one per token, or one per turn.

    A turn is a run of trained tokens; tokens that the policy did not write, such as a tool's answer, end it.
    """
    index, ids = part.keep.nonzero().flatten(), part.ids[part.keep]
    first = torch.ones_like(index, dtype=torch.bool)
    if unit == "turn":
        first[1:] = (index[1:] != index[:-1] + 1) | (ids[1:] != ids[:-1])
    return Timesteps(first.long().cumsum(0) - 1, first)


class Gae(Advantage):
    """PPO's advantages from a critic: GAE(gamma, lambda), whitened over all tokens; the reward is on the last token.

    Also sets the critic's targets, returns = advantage + value, for the loss term `value`.

    `timestep: turn` (AReaL) makes each of the policy's turns one step: its reward is the sum over its tokens, its
    value is the one at its first token, and all its tokens have its advantage and its return. `alpha` (VAPO) makes
    lambda grow with the response: 1 - 1 / (alpha l), at least 0, where l counts the response's timesteps.
    `critic_lam` (VAPO, VC-PPO) gives the critic's targets a lambda of their own; 1 makes them plain returns.

    The value after the last token is 0, as in verl, also for a truncated response; AReaL uses the value of its last
    token. Each sequence of a sample is a separate episode with the sample's reward on its last token.
    """

    paper: ClassVar[str] = (
        "High-dimensional continuous control using GAE (Schulman et al. 2016), eq. 16; VAPO (arXiv 2504.05118)"
    )
    evidence: ClassVar[str] = "R"
    of_samples: ClassVar[bool] = False
    gamma: Unit = 1.0
    """Discount per timestep."""
    lam: Unit = 0.95
    """Lambda: 1 gives the full return, 0 looks one timestep ahead."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Lambda is 1 - 1 / (alpha l) instead of `lam` (VAPO: 0.05 for responses of thousands of tokens; it is 0, so that
    an advantage looks one token ahead, for responses of up to 1 / alpha)."""
    critic_lam: Unit | None = None
    """Lambda of the critic's targets. Unset: that of the advantages."""
    timestep: Literal["token", "turn"] = "token"
    """Time step of gamma and lambda: a token, or a turn of the model."""
    rewards: Literal["response", "turns"] = "response"
    """Unit that has a reward: the response, on its last token, or each turn."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference, on each token's reward."""
    whiten: bool = True
    """Whiten over all tokens of the step."""

    def needs(self) -> frozenset[str]:
        needs = {"values"} | ({"old", "ref"} if self.beta else set())
        return frozenset(needs | ({"turn_rewards"} if self.rewards == "turns" else set()))

    def __call__(self, samples: Samples) -> Tensor:
        return samples.reward

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        out = []
        for part in parts:
            rewards = self._rewards(part, advantages, samples)
            if self.beta:
                rewards = rewards - self.beta * part.masked(part.signal("old") - part.signal("ref"))
            estimate, part.returns = self._estimate(part, rewards)
            out.append(estimate)
        return whiten_tokens(out, parts, reduce) if self.whiten else out

    def _rewards(self, part: Batch, advantages: Tensor, samples: Samples) -> Tensor:
        """Return the rewards on the tokens that have them, `[T]`."""
        if self.rewards == "response":
            return torch.where(last_token(part), part.expand(advantages), torch.zeros_like(part.mu))
        table = samples.column("turn_rewards").to(part.mu)
        # Where no model sampled the token, its turn is -1: what that reads is masked.
        of_turn = table[part.rows.to(table.device)[part.ids], part.signal("turns")]
        return torch.where(turn_ends(part), of_turn, torch.zeros_like(part.mu))

    def _estimate(self, part: Batch, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and the critic's targets, `[T]`; 0 where masked."""
        steps, keep = timesteps(part, self.timestep), part.keep
        values = part.signal("values").detach()[keep][steps.first]
        ids = part.ids[keep][steps.first]
        summed = sum_by(rewards[keep], steps.of, len(ids))
        lam = self._lambda(ids, part.sequences).to(values)
        estimates = gae(summed, values, ids, self.gamma, lam)
        target_estimates = (
            estimates if self.critic_lam is None else gae(summed, values, ids, self.gamma, self.critic_lam)
        )

        def to_tokens(x: Tensor) -> Tensor:
            """Return for each token the value of its timestep: `[K]` -> `[T]`."""
            return torch.zeros_like(part.mu).masked_scatter(keep, x[steps.of])

        return to_tokens(estimates), to_tokens(target_estimates + values)

    def _lambda(self, ids: Tensor, sequences: int) -> Tensor:
        """Return lambda of each timestep, `[K]`."""
        if self.alpha is None:
            return torch.full(ids.shape, self.lam, dtype=torch.float64, device=ids.device)
        lengths = torch.bincount(ids, minlength=sequences).double()[ids]
        return (1 - 1 / (self.alpha * lengths)).clamp(min=0)
