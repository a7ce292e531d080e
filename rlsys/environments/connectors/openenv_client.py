"""OpenEnv: an environment behind its own server (a container, a Space), spoken to with the package's generic client.

`field` is the key of an action that holds the model's text; without it a turn is JSON, or a turn's last <action> is.
`show` is the key of the observation that the model reads; without it, all of it as JSON. A server that plays one
session at a time needs as many servers as there are leases.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.contract import Action, Opening, Step, says


class Servers:
    def __init__(
        self,
        url: str | Sequence[str],
        field: str | None = None,
        show: str | None = None,
        question: str = "",
        penalty: float = 0.0,
        seeded: bool = True,
    ) -> None:
        """`url`: of one server, or of several that take turns. `seeded`: reset takes a seed. `penalty`: of a turn
        that is no action."""
        self._core: Any = importlib.import_module("openenv.core.generic_client")
        self._urls = itertools.cycle([url] if isinstance(url, str) else list(url))
        self._field, self._show, self._question = field, show, question
        self._penalty, self._seeded = penalty, seeded

    def open(self, task: Mapping[str, Any], seed: int) -> Session:
        client = self._core.GenericEnvClient(base_url=next(self._urls)).sync()
        reset = dict(task.get("reset", {})) | ({"seed": seed} if self._seeded else {})
        return Session(client, reset, self._field, self._show, self._question, self._penalty)


class Session:
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
        shown = self._shown(client.reset(**reset).observation)
        self.opening = Opening(says(f"{question}\n{shown}" if question else shown))

    def step(self, action: Action) -> Step:
        made = self._action(action.text)
        if made is None:
            return Step(says("error: no action; expected a JSON object"), self._penalty)
        result = self._client.step(made)
        return Step(says(self._shown(result.observation)), float(result.reward or 0.0), bool(result.done))

    def _action(self, text: str) -> dict[str, Any] | None:
        if self._field is not None:
            return {self._field: text}
        _, opened, rest = text.rpartition("<action>")
        try:
            found = json.loads(rest.partition("</action>")[0] if opened else text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._show is not None:
            return str(observation.get(self._show, ""))
        return json.dumps(observation, sort_keys=True, default=str)

    def close(self) -> None:
        self._client.close()


make = Servers
