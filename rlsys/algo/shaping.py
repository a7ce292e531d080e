"""Reward shaping in the trainer: only advantages use shaped rewards; the ledger and planners use the original
ones."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.kl import KL_KINDS, KlKind
from rlsys.algo.plugin import Plugin


class Shaping(Plugin):
    """Base of reward shaping: map the sample table to the shaped reward of each sample."""

    def __call__(self, samples: Samples) -> Tensor:
        """Return the shaped rewards, `[N]` or `[N, R]` as `samples.rewards`."""
        raise NotImplementedError


def take_off(rewards: Tensor, penalty: Tensor) -> Tensor:
    """Return rewards `[N]` minus a penalty `[N]`; for `[N, R]` each of the R rewards is reduced by an equal part."""
    return rewards - penalty if rewards.dim() == 1 else rewards - penalty[:, None] / rewards.shape[1]


class Overlong(Shaping):
    """DAPO's soft overlong punishment: a linear penalty in the last `buffer` tokens before the cap.

    R - factor * clip((length - (cap - buffer)) / buffer, 0, 1).
    """

    paper: ClassVar[str] = "DAPO, section 3.4, eq. 13"
    evidence: ClassVar[str] = "R"
    cap: Annotated[int, Field(gt=0)] = 256
    """Length in tokens from which the penalty is full, usually rollout.max_response_tokens."""
    buffer: Annotated[int, Field(gt=0)] = 64
    """Tokens before the cap in which the penalty grows (DAPO: a fifth of the cap)."""
    factor: Annotated[float, Field(ge=0)] = 1.0
    """Penalty at the cap."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.buffer > self.cap:
            raise ValueError(
                f"buffer = {self.buffer}: expected at most cap = {self.cap}; otherwise every response is penalised"
            )
        return self

    def __call__(self, samples: Samples) -> Tensor:
        over = (samples.lengths.to(samples.rewards) - (self.cap - self.buffer)) / self.buffer
        penalty = self.factor * over.clamp(0, 1)
        return take_off(samples.rewards, penalty)


class KlReward(Shaping):
    """R - beta * sum over tokens of an estimate of KL(old || ref): inside the reward, before the group's baseline.

    The estimates are those of the loss term `kl`, from the log-probs at the start of the step; k1 = old - ref. k3 is
    at most 10 for a token, as in the loss term.
    """

    paper: ClassVar[str] = "InstructGPT, eq. 2; Schulman, Approximating KL divergence"
    evidence: ClassVar[str] = "R"
    beta: Annotated[float, Field(ge=0)] = 1e-3
    """Weight."""
    kind: KlKind = "k1"
    """Estimator."""

    def needs(self) -> frozenset[str]:
        return frozenset({"old", "ref"})

    def __call__(self, samples: Samples) -> Tensor:
        penalty = self.beta * samples.column("kl")[:, KL_KINDS.index(self.kind)].to(samples.rewards)
        return take_off(samples.rewards, penalty)
