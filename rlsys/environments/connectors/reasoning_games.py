"""reasoning-gym: one question of a data set, and its own verifier's score of the answer.

The task's `item`, or else the seed, chooses the question. With `turns` above 1 the model may answer again after a
wrong answer.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from rlsys.environments.contract import Action, Opening, Step, says


class Puzzles:
    def __init__(
        self,
        dataset: str,
        params: Mapping[str, Any] | None = None,
        answer: str = r"<answer>(.*?)</answer>",
        turns: int = 1,
        again: str = "Wrong. Try again.",
    ) -> None:
        """`answer`: where the answer stands in a turn; a turn without it is the answer as a whole."""
        package: Any = importlib.import_module("reasoning_gym")
        self._made = package.create_dataset(dataset, **dict(params or {}))
        self._answer, self._turns, self._again = re.compile(answer, re.DOTALL), turns, again

    def open(self, task: Mapping[str, Any], seed: int) -> Puzzle:
        entry = self._made[int(task.get("item", seed)) % len(self._made)]
        return Puzzle(self._made, entry, self._answer, self._turns, self._again)


class Puzzle:
    def __init__(self, made: Any, entry: Any, answer: re.Pattern[str], turns: int, again: str) -> None:
        self._made, self._entry, self._answer = made, entry, answer
        self._left, self._again = turns, again
        self.opening = Opening(says(entry["question"]))

    def step(self, action: Action) -> Step:
        found = self._answer.findall(action.text)
        answer = (found[-1] if found else action.text).strip()
        score = float(self._made.score_answer(answer=answer, entry=self._entry))
        self._left -= 1
        done = score >= 1 or self._left <= 0
        return Step(says(self._again), score if done else 0.0, done, score >= 1 if done else None)

    def close(self) -> None:
        """Nothing is held."""


make = Puzzles
