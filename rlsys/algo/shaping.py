"""Reward shaping in the trainer.

Only advantages use shaped rewards; the ledger and planners use the original ones. Shapes: N samples, R rewards each.
"""

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
        """Return the shaped rewards in the shape of `samples.rewards`, `[N]` or `[N, R]`."""
        raise NotImplementedError


def subtract_penalty(rewards: Tensor, penalty: Tensor) -> Tensor:
    """Return rewards `[N]` minus a penalty `[N]`. From rewards `[N, R]`, subtract penalty / R from each of the R."""
    return rewards - penalty if rewards.dim() == 1 else rewards - penalty[:, None] / rewards.shape[1]


class Overlong(Shaping):
    """DAPO's soft overlong punishment: a penalty that grows linearly in the last `buffer` tokens before the cap.

    The shaped reward is R - factor * clip((length - (cap - buffer)) / buffer, 0, 1).
    """

    paper: ClassVar[str] = "DAPO, section 3.4, eq. 13"
    evidence: ClassVar[str] = "R"
    cap: Annotated[int, Field(gt=0)] = 256
    """Smallest length with the full penalty, in tokens; usually rollout.max_response_tokens."""
    buffer: Annotated[int, Field(gt=0)] = 64
    """Number of tokens before the cap over which the penalty grows (DAPO: a fifth of the cap)."""
    factor: Annotated[float, Field(ge=0)] = 1.0
    """Full penalty."""

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        if self.buffer > self.cap:
            raise ValueError(
                f"buffer = {self.buffer}: expected at most cap = {self.cap}; otherwise every response is penalised"
            )
        return self

    def __call__(self, samples: Samples) -> Tensor:
        excess = (samples.lengths.to(samples.rewards) - (self.cap - self.buffer)) / self.buffer
        penalty = self.factor * excess.clamp(0, 1)
        return subtract_penalty(samples.rewards, penalty)


class KlReward(Shaping):
    """KL penalty in the reward: R - beta * sum over tokens of an estimate of KL(old || ref).

    The penalty changes the reward before the group's baseline is subtracted. The estimators are those of the loss
    term `kl`, with the log-probs at the start of the step. k3 is at most 10 for each token, as in the loss term.
    """

    paper: ClassVar[str] = "InstructGPT, eq. 2; Schulman, Approximating KL divergence"
    evidence: ClassVar[str] = "R"
    beta: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the penalty."""
    kind: KlKind = "k1"
    """Estimator of the KL divergence."""

    def needs(self) -> frozenset[str]:
        return frozenset({"old", "ref"})

    def __call__(self, samples: Samples) -> Tensor:
        penalty = self.beta * samples.column("kl")[:, KL_KINDS.index(self.kind)].to(samples.rewards)
        return subtract_penalty(samples.rewards, penalty)
