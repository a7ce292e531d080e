"""Connector of Gymnasium: the model writes actions as numbers or names.

action space        action of a turn
Discrete            the last integer, or with `actions` the last of these names
Box of n elements   the last n numbers

A turn without an action does not step the environment. Its reward is `penalty`, and the model reads the possible
actions.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.contract import Action, Opening, Step, as_messages

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class GymnasiumEnvironment:
    """Creates a Gymnasium environment for each episode, and passes the task's `options` to its reset."""

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        question: str = "",
        penalty: float = 0.0,
        modules: Sequence[str] = (),
    ) -> None:
        """Check the arguments by creating an environment once.

        Args:
            id: id of the environment.
            kwargs: arguments of `gymnasium.make`.
            actions: names of the discrete actions, in order; None: the model writes their numbers.
            question: text before the first observation.
            penalty: reward of a turn without an action.
            modules: modules to import first, because they register environments.
        """
        for module in modules:
            importlib.import_module(module)
        self._gymnasium: Any = importlib.import_module("gymnasium")
        self._id, self._kwargs = id, dict(kwargs or {})
        self._names, self._question, self._penalty = list(actions or ()), question, penalty
        self._gymnasium.make(id, **self._kwargs).close()  # reports a wrong id at the start

    def open(self, task: Mapping[str, Any], seed: int) -> GymnasiumEpisode:
        environment = self._gymnasium.make(self._id, **self._kwargs)
        return GymnasiumEpisode(
            environment, seed, task.get("options"), self._names, self._question, self._penalty
        )


class GymnasiumEpisode:
    def __init__(
        self,
        environment: Any,
        seed: int,
        options: Mapping[str, Any] | None,
        names: Sequence[str],
        question: str,
        penalty: float,
    ) -> None:
        self._environment, self._names, self._penalty = environment, names, penalty
        observation, _ = environment.reset(seed=seed, options=None if options is None else dict(options))
        environment.action_space.seed(seed)
        text = f"{question}\n{_observation_text(observation)}" if question else _observation_text(observation)
        self.opening = Opening(as_messages(text))

    def step(self, action: Action) -> Step:
        parsed_action = self._parse_action(action.text)
        if parsed_action is None:
            expected = f"expected {self._environment.action_space}"
            choices = f"choose one of {', '.join(self._names)}" if self._names else expected
            return Step(as_messages(f"no action; {choices}"), self._penalty)
        observation, reward, terminated, truncated, _ = self._environment.step(parsed_action)
        return Step(as_messages(_observation_text(observation)), float(reward), bool(terminated or truncated))

    def _parse_action(self, text: str) -> Any:
        """Return the action in a text; None if the text has no action, or one outside the action space."""
        space = self._environment.action_space
        if self._names:
            positions = [(text.rfind(name), i) for i, name in enumerate(self._names)]
            position, index = max(positions)
            return index + int(getattr(space, "start", 0)) if position >= 0 else None
        numbers = _NUMBER.findall(text)
        if hasattr(space, "n"):
            value: Any = next((int(n) for n in reversed(numbers) if "." not in n), None)
        else:
            size = 1
            for length in space.shape:
                size *= length
            if len(numbers) < size:
                return None
            numpy: Any = importlib.import_module("numpy")
            value = numpy.array([float(n) for n in numbers[-size:]], dtype=space.dtype).reshape(space.shape)
        return value if value is not None and space.contains(value) else None

    def close(self) -> None:
        self._environment.close()


def _observation_text(observation: Any) -> str:
    return str(observation.tolist() if hasattr(observation, "tolist") else observation)


make = GymnasiumEnvironment
