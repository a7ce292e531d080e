"""Connector of reasoning-gym: an episode is one question of a dataset, and the dataset's verifier scores the answer.

The task's `item` is the index of the question; without it, the seed is. With `turns` above 1, the model may try again
after a wrong answer.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from rlsys.environments.contract import Action, Opening, Step, as_messages


class ReasoningGymEnvironment:
    def __init__(
        self,
        dataset: str,
        params: Mapping[str, Any] | None = None,
        answer: str = r"<answer>(.*?)</answer>",
        turns: int = 1,
        retry_message: str = "Wrong. Try again.",
    ) -> None:
        """Create the dataset.

        Args:
            dataset: name of the dataset.
            params: arguments of the dataset.
            answer: regular expression whose group is the answer. If it has no match, the whole turn is the answer.
            turns: largest number of turns.
            retry_message: message after a wrong answer.
        """
        package: Any = importlib.import_module("reasoning_gym")
        self._dataset = package.create_dataset(dataset, **dict(params or {}))
        self._answer, self._turns, self._retry_message = re.compile(answer, re.DOTALL), turns, retry_message

    def open(self, task: Mapping[str, Any], seed: int) -> ReasoningGymEpisode:
        entry = self._dataset[int(task.get("item", seed)) % len(self._dataset)]
        return ReasoningGymEpisode(self._dataset, entry, self._answer, self._turns, self._retry_message)


class ReasoningGymEpisode:
    def __init__(
        self, dataset: Any, entry: Any, answer: re.Pattern[str], turns: int, retry_message: str
    ) -> None:
        self._dataset, self._entry, self._answer = dataset, entry, answer
        self._turns_left, self._retry_message = turns, retry_message
        self.opening = Opening(as_messages(entry["question"]))

    def step(self, action: Action) -> Step:
        matches = self._answer.findall(action.text)
        answer = (matches[-1] if matches else action.text).strip()
        score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
        self._turns_left -= 1
        done = score >= 1 or self._turns_left <= 0
        messages = as_messages(self._retry_message)
        return Step(messages, score if done else 0.0, done, score >= 1 if done else None)

    def close(self) -> None:
        """Do nothing: the episode has no resources."""


make = ReasoningGymEnvironment
