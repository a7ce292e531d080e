"""Environment for recipes with turn rewards: after a wrong answer the model may try again, for half the reward.

The model reads only the prompt of the data row, and must end its turn with <answer>X</answer>, where X is the row's
`answer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.environments.contract import Action, Opening, Step, as_messages


class SecondTry:
    def open(self, task: Mapping[str, Any], seed: int) -> Try:
        return Try(f"<answer>{task['answer']}</answer>")


class Try:
    opening = Opening()

    def __init__(self, answer: str) -> None:
        self._answer, self._turns = answer, 0

    def step(self, action: Action) -> Step:
        self._turns += 1
        right = action.text.endswith(self._answer)
        return Step(as_messages("again"), right / self._turns, right or self._turns == 2)

    def close(self) -> None:
        """Do nothing: the episode has no resources."""
