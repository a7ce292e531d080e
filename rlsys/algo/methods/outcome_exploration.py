"""Outcome-based exploration for LLM reasoning: a bonus for rare final answers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import PrivateAttr
from torch import Tensor

from rlsys.algo.advantages import Advantage, by_group, grpo
from rlsys.algo.batch import Samples


class OutcomeExploration(Advantage):
    """GRPO's advantage plus c times a bonus for rare final answers, which is not normalised.

    The bonus is
    - `mode: ucb_con`: min(1, 1 / sqrt(n)) - b0, where n is the number of earlier occurrences of the answer for this
      prompt. With b0 = 1/2 it is negative for n > 4.
    - `mode: ucb_mean`: min(1, 1 / sqrt(n)) minus its mean over the responses of the step with an answer.
    - `mode: batch`: minus the share of the group's samples that are other samples with the same answer.

    Responses without an answer get no bonus. The paper does not state c.
    """

    paper: ClassVar[str] = "Outcome-based exploration for LLM reasoning"
    compares: ClassVar[bool] = True
    group_local: ClassVar[bool] = False
    evidence: ClassVar[str] = "P"
    mode: Literal["ucb_con", "ucb_mean", "batch"] = "ucb_con"
    """Kind of bonus."""
    c: float = 0.1
    """Weight of the bonus."""
    b0: float = 0.5
    """Constant that ucb_con subtracts."""
    _visits: dict[str, int] = PrivateAttr(default_factory=dict)
    """PROMPT:ANSWER -> number of earlier occurrences."""

    def needs(self) -> frozenset[str]:
        return frozenset({"answers", "prompt_index"})

    def __call__(self, samples: Samples) -> Tensor:
        base = grpo(samples.reward, samples.group_ids)
        answers = samples.column("answers")
        bonus = self._rare_in_group(samples) if self.mode == "batch" else self._rare_in_history(samples)
        if self.mode == "ucb_mean" and (answers >= 0).any():
            bonus = bonus - bonus[answers >= 0].mean()
        return base + self.c * torch.where(answers >= 0, bonus.to(base), torch.zeros_like(base))

    def _rare_in_group(self, samples: Samples) -> Tensor:
        """Return minus the share of other samples of the group with the same answer, `[N]`."""

        def group_bonus(answers: Tensor) -> Tensor:
            siblings = (answers[:, None] == answers[None, :]).sum(1) - 1
            return -siblings.to(answers.dtype) / len(answers)

        return by_group(group_bonus, samples.column("answers").to(samples.reward.dtype), samples.group_ids)

    def _rare_in_history(self, samples: Samples) -> Tensor:
        """Return min(1, 1 / sqrt(n)), minus b0 for ucb_con, `[N]` float64, and count the answers of this step."""
        pairs = zip(samples.column("prompt_index").tolist(), samples.column("answers").tolist(), strict=True)
        keys = [f"{prompt}:{answer}" for prompt, answer in pairs]
        visits = torch.tensor([self._visits.get(k, 0) for k in keys], dtype=torch.float64)
        for key in keys:
            self._visits[key] = self._visits.get(key, 0) + 1
        bonus = visits.clamp(min=1).rsqrt()
        return (bonus - self.b0 if self.mode == "ucb_con" else bonus).to(samples.reward.device)

    def state_dict(self) -> dict[str, Any]:
        return {"visits": self._visits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._visits = dict(state["visits"])
