"""Advantage estimators: map the rewards of complete groups to one advantage per sample.

Shapes: N samples, R rewards per sample, T tokens. Samples of one group have the same value in `group_ids` `[N]`, any
integer in any order. mean_g and std_g are over the samples of a group. The functions are the formulas, and the
classes are the plug-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlsys.algo.batch import Batch, Samples, check_floating
from rlsys.algo.plugin import REWARD_TOLERANCE, Plugin
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import group_index, group_mean, group_std, groups_of, merge_close

Eps = Annotated[float, Field(ge=0)]


def grpo(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute (R - mean_g) / (std_g + eps), `[N]` (GRPO, DeepSeekMath, section 4.1).

    std_g divides by n - 1. The advantage is 0 if all rewards of the group are equal up to rounding.
    """
    _check(rewards, group_ids)
    rewards = merge_close(rewards, group_ids, rewards.abs(), REWARD_TOLERANCE)
    return dr_grpo(rewards, group_ids) / (group_std(rewards, group_ids) + eps)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Compute R - mean_g, `[N]`, without division by the standard deviation (Dr. GRPO, section 3)."""
    _check(rewards, group_ids)
    return rewards - group_mean(rewards, group_ids)


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    """Check that both tensors are `[N]`, and that rewards have a floating-point type.

    Raises:
        ValueError: they are not.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)}; expected both to be [N]"
        )
    check_floating("rewards", rewards)


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Compute each reward minus the mean of the other rewards of its group, `[N]`.

    This is n / (n - 1) (R - mean_g) in a group of n samples, and 0 in a group of one.
    """
    index, sizes = group_index(group_ids)
    n = sizes[index].to(rewards.dtype)
    return dr_grpo(rewards, group_ids) * n / (n - 1).clamp(min=1)


def deviation(values: Tensor) -> Tensor:
    """Return the standard deviation of `values` `[N]`, with divisor n - 1; 0 for a single value."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def whiten(values: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute (x - mean) / (std + eps), `[N]`, with mean and std (divisor n - 1) over all values.

    The result is 0 for a single value, and if all values are equal up to rounding.
    """
    std = deviation(values)
    if std <= REWARD_TOLERANCE * values.abs().max():
        return torch.zeros_like(values)
    return (values - values.mean()) / (std + eps)


class Advantage(Plugin):
    """Base of advantage estimators: map the rewards of complete groups to advantages of samples and tokens."""

    group_local: ClassVar[bool] = True
    """Whether a group's advantages depend on that group alone."""
    compares: ClassVar[bool] = False
    """Whether the estimator compares the samples of a group. The advantage in a group of one sample is then 0."""

    of_samples: ClassVar[bool] = True
    """Whether `__call__` returns advantages. If not, it returns rewards, and `per_token` computes advantages."""

    @property
    def of_turns(self) -> bool:
        """Return whether the estimator uses rewards of turns in addition to the sample's reward."""
        return "turn_rewards" in self.needs()

    def __call__(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample, `[N]`."""
        raise NotImplementedError

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        """Return the advantages of tokens, `[T]` for each packed batch.

        By default, a token has the advantage of its sample.

        Args:
            advantages: result of `__call__`, `[N]`.
            samples: the sample table of the step.
            parts: packed batches of this rank.
            reduce: sum over ranks, for statistics over all tokens of the step.
        """
        return [part.masked(part.expand(advantages)) for part in parts]

    @classmethod
    def changes_tokens(cls) -> bool:
        """Return whether tokens of a sample can have different advantages."""
        return cls.per_token is not Advantage.per_token


class Grpo(Advantage):
    """(R - mean) / (std + eps) within the group; 0 if all rewards of the group are equal."""

    paper: ClassVar[str] = "DeepSeekMath (GRPO), section 4.1"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    eps: Eps = 1e-6
    """Added to the standard deviation."""

    def __call__(self, samples: Samples) -> Tensor:
        return grpo(samples.reward, samples.group_ids, self.eps)


class DrGrpo(Advantage):
    """R - mean within the group, without division by the standard deviation.

    The division would give more weight to prompts that are nearly always or nearly never solved. Dr. GRPO also
    divides the loss by a constant length instead of the responses' lengths: `reducer: constant`.
    """

    paper: ClassVar[str] = "Understanding R1-Zero-like training (Dr. GRPO), section 3"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Tensor:
        return dr_grpo(samples.reward, samples.group_ids)


class Rloo(Advantage):
    """A sample's reward minus the mean reward of the other samples of its group."""

    paper: ClassVar[str] = "Back to basics: REINFORCE leave-one-out (Ahmadian et al. 2024)"
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Tensor:
        return rloo(samples.reward, samples.group_ids)


NonNegativeFloat = Annotated[float, Field(ge=0)]


def by_group(function: Callable[[Tensor], Tensor], values: Tensor, group_ids: Tensor) -> Tensor:
    """Apply `function` to each group's values `[n]` and return the results as `[N]`."""
    out = torch.zeros_like(values)
    for members in groups_of(group_ids):
        out[members] = function(values[members])
    return out


def middle(sorted_values: Tensor) -> Tensor:
    """Return the median of sorted values `[n]`; for an even number, the mean of the two middle ones."""
    n = len(sorted_values)
    return (sorted_values[(n - 1) // 2] + sorted_values[n // 2]) / 2
