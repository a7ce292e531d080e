"""Connector of OpenEnv: an environment on its own server (a container, a Space), with the package's generic client.

The action of a turn is {`field`: its text}. Without `field`, the turn, or its last <action> element, must be the
action as JSON. The model reads the value of the observation's key `show`, or without `show` the whole observation as
JSON. A server that supports one session at a time needs a `url` for each lease.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.contract import Action, Opening, Step, as_messages


class OpenEnvEnvironment:
    def __init__(
        self,
        url: str | Sequence[str],
        field: str | None = None,
        show: str | None = None,
        question: str = "",
        penalty: float = 0.0,
        seeded: bool = True,
    ) -> None:
        """Import the package; sessions start with their episodes.

        Args:
            url: address of a server, or a list of addresses, which are used in rotation.
            field: key of the action that gets the model's text; None: the model writes JSON.
            show: key of the observation that the model reads; None: the whole observation.
            question: text before the first observation.
            penalty: reward of a turn without an action.
            seeded: whether the environment's reset accepts a seed.
        """
        self._core: Any = importlib.import_module("openenv.core.generic_client")
        self._urls = itertools.cycle([url] if isinstance(url, str) else list(url))
        self._field, self._show, self._question = field, show, question
        self._penalty, self._seeded = penalty, seeded

    def open(self, task: Mapping[str, Any], seed: int) -> OpenEnvEpisode:
        client = self._core.GenericEnvClient(base_url=next(self._urls)).sync()
        reset = dict(task.get("reset", {})) | ({"seed": seed} if self._seeded else {})
        return OpenEnvEpisode(client, reset, self._field, self._show, self._question, self._penalty)


class OpenEnvEpisode:
    def __init__(
        self,
        client: Any,
        reset: Mapping[str, Any],
        field: str | None,
        show: str | None,
        question: str,
        penalty: float,
    ) -> None:
        self._client, self._field, self._show, self._penalty = client, field, show, penalty
        client.connect()
        observation_text = self._observation_text(client.reset(**reset).observation)
        self.opening = Opening(
            as_messages(f"{question}\n{observation_text}" if question else observation_text)
        )

    def step(self, action: Action) -> Step:
        parsed_action = self._action(action.text)
        if parsed_action is None:
            return Step(as_messages("error: no action; expected a JSON object"), self._penalty)
        result = self._client.step(parsed_action)
        messages = as_messages(self._observation_text(result.observation))
        return Step(messages, float(result.reward or 0.0), bool(result.done))

    def _action(self, text: str) -> dict[str, Any] | None:
        """Return the action in a turn; None if it is not a JSON object."""
        if self._field is not None:
            return {self._field: text}
        _, start_tag, tail = text.rpartition("<action>")
        try:
            action = json.loads(tail.partition("</action>")[0] if start_tag else text)
        except ValueError:
            return None
        return action if isinstance(action, dict) else None

    def _observation_text(self, observation: Mapping[str, Any]) -> str:
        if self._show is not None:
            return str(observation.get(self._show, ""))
        return json.dumps(observation, sort_keys=True, default=str)

    def close(self) -> None:
        self._client.close()


make = OpenEnvEnvironment
