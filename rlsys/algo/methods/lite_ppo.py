"""Lite PPO (Tricks or traps? A deep dive into RL for LLM reasoning)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, deviation, dr_grpo
from rlsys.algo.batch import Samples


class LitePPO(Advantage):
    """(R - mean of the group) / (std of the whole step + eps): TRL's `scale_rewards: batch`.

    The deviation is that of all rewards of the step, with n - 1, so that a group of nearly equal rewards is not
    amplified by its small deviation. The paper combines it with the mean over tokens: `reducer: token_mean`.
    """

    paper: ClassVar[str] = (
        "Tricks or traps? A deep dive into RL for LLM reasoning (Lite PPO, arXiv 2508.08221), reward_norm of ROLL, "
        "the authors' framework; TRL grpo_trainer.py"
    )
    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    eps: Eps = 1e-4
    """Added to the standard deviation. 1e-4 is TRL's; ROLL adds 1e-6."""

    def __call__(self, samples: Samples) -> Tensor:
        return dr_grpo(samples.reward, samples.group_ids) / (deviation(samples.reward) + self.eps)
