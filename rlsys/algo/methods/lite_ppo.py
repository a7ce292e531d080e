"""Lite PPO: advantages scaled by the standard deviation of the whole step (arXiv 2508.08221)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, deviation, dr_grpo
from rlsys.algo.batch import Samples


class LitePPO(Advantage):
    """(R - mean of the group) / (std of the step + eps), as TRL's `scale_rewards: batch`.

    The standard deviation is over all rewards of the step (divisor n - 1), so a group of nearly equal rewards does
    not get large advantages. The paper combines the method with the mean over tokens, `reducer: token_mean`.
    """

    paper: ClassVar[str] = (
        "Tricks or traps? A deep dive into RL for LLM reasoning (Lite PPO, arXiv 2508.08221), reward_norm of ROLL, "
        "the authors' framework; TRL grpo_trainer.py"
    )
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    eps: Eps = 1e-4
    """Added to the standard deviation (TRL: 1e-4; ROLL: 1e-6)."""

    def __call__(self, samples: Samples) -> Tensor:
        return dr_grpo(samples.reward, samples.group_ids) / (deviation(samples.reward) + self.eps)
