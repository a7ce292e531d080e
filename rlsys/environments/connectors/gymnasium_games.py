"""Gymnasium: an environment by its id, whose actions the model writes as numbers.

A discrete action is the last whole number of a turn, or the last one of `actions` that stands in it; a box takes as
many numbers as it has places. A turn without an action changes nothing and costs `penalty`: the model reads which
actions there are.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.contract import Action, Opening, Step, says

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Games:
    """The environment `id`, made anew for each episode. The task may have `options` for its reset."""

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        question: str = "",
        penalty: float = 0.0,
        modules: Sequence[str] = (),
    ) -> None:
        """`actions`: names of the discrete actions, in their order. `question`: said before the first observation.
        `modules`: imported first, to register environments."""
        for module in modules:
            importlib.import_module(module)
        self._gymnasium: Any = importlib.import_module("gymnasium")
        self._id, self._kwargs = id, dict(kwargs or {})
        self._names, self._question, self._penalty = list(actions or ()), question, penalty
        self._gymnasium.make(id, **self._kwargs).close()  # a mistake in its name is told now

    def open(self, task: Mapping[str, Any], seed: int) -> Game:
        made = self._gymnasium.make(self._id, **self._kwargs)
        return Game(made, seed, task.get("options"), self._names, self._question, self._penalty)


class Game:
    def __init__(
        self,
        made: Any,
        seed: int,
        options: Mapping[str, Any] | None,
        names: Sequence[str],
        question: str,
        penalty: float,
    ) -> None:
        self._made, self._names, self._penalty = made, names, penalty
        observation, _ = made.reset(seed=seed, options=None if options is None else dict(options))
        made.action_space.seed(seed)
        text = f"{question}\n{_shown(observation)}" if question else _shown(observation)
        self.opening = Opening(says(text))

    def step(self, action: Action) -> Step:
        chosen = self._chosen(action.text)
        if chosen is None:
            return Step(says(f"no action; {self._choices()}"), self._penalty)
        observation, reward, terminated, truncated, _ = self._made.step(chosen)
        return Step(says(_shown(observation)), float(reward), bool(terminated or truncated))

    def _chosen(self, text: str) -> Any:
        """None: the text has none that the space takes."""
        space = self._made.action_space
        if self._names:
            places = [(text.rfind(name), i) for i, name in enumerate(self._names)]
            last, index = max(places)
            return index + int(getattr(space, "start", 0)) if last >= 0 else None
        numbers = _NUMBER.findall(text)
        if hasattr(space, "n"):
            found: Any = next((int(n) for n in reversed(numbers) if "." not in n), None)
        else:
            size = 1
            for length in space.shape:
                size *= length
            if len(numbers) < size:
                return None
            numpy: Any = importlib.import_module("numpy")
            found = numpy.array([float(n) for n in numbers[-size:]], dtype=space.dtype).reshape(space.shape)
        return found if found is not None and space.contains(found) else None

    def _choices(self) -> str:
        return (
            f"choose one of {', '.join(self._names)}"
            if self._names
            else f"expected {self._made.action_space}"
        )

    def close(self) -> None:
        self._made.close()


def _shown(observation: Any) -> str:
    return str(observation.tolist() if hasattr(observation, "tolist") else observation)


make = Games
