"""Connector of verifiers (0.1): environments of one or several turns, with their tools and rubrics.

The package runs its own rollout, with its stop conditions, tools and rewards, in the event loop of a thread. The
rollout's client is defined here (QueueClient): it hands each request as messages to the model, and returns the
model's turn as the response. The task's `example` is the index of the dataset's row; without it, the seed is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import json
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.connectors.loop_thread import LoopThread
from rlsys.environments.contract import Action, Message, Opening, Step

_ModelRequest = tuple[list[Message], list[dict[str, Any]]]


class VerifiersEnvironment:
    def __init__(self, load: str, args: Mapping[str, Any] | None = None) -> None:
        """Load the environment.

        Args:
            load: `package.module:load_environment`, `path/to/file.py:load_environment`, or an environment's name.
            args: arguments of the function, or of the package's `load_environment`.
        """
        package: Any = importlib.import_module("verifiers")
        self._package, self._client = package, _client_class(package)
        if ":" in load:
            from rlsys.environments.serve import load_connector

            self._environment = load_connector(load)(**dict(args or {}))
        else:
            self._environment = package.load_environment(load, **dict(args or {}))
        self._rows = self._environment.get_dataset()
        self._loop = LoopThread()

    def open(self, task: Mapping[str, Any], seed: int) -> VerifiersEpisode:
        row = dict(self._rows[int(task.get("example", seed)) % len(self._rows)])
        client = self._client()
        work = self._environment.run_rollout(row, client, "policy", {})
        return VerifiersEpisode(client, self._loop.begin(work))


class VerifiersEpisode:
    def __init__(self, client: Any, rollout: concurrent.futures.Future[Any]) -> None:
        self._client, self._rollout = client, rollout
        rollout.add_done_callback(lambda _: client.requests.put(None))
        request = self._next()
        if request is None:
            raise RuntimeError(f"the rollout ended before the model's first turn: {self._reward()}")
        self._prompt, tools = request
        self.opening = Opening(self._prompt, tools)

    def _next(self) -> _ModelRequest | None:
        """Wait for the next request to the model; None: the rollout has ended."""
        request: _ModelRequest | None = self._client.requests.get()
        return request

    def step(self, action: Action) -> Step:
        prefix_length = len(self._prompt)
        self._client.answer(action)
        request = self._next()
        if request is None:
            reward, right = self._reward()
            return Step(reward=reward, done=True, right=right)
        self._prompt, _ = request
        return Step(self._prompt[prefix_length + 1 :])

    def _reward(self) -> tuple[float, bool]:
        output = self._rollout.result()
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        return float(output["reward"]), float(output["reward"]) >= 1

    def close(self) -> None:
        self._rollout.cancel()


def _client_class(package: Any) -> Any:
    """Return a subclass of the package's client that puts its requests into the queue `requests`."""
    clients: Any = importlib.import_module("verifiers.clients")
    types: Any = importlib.import_module("verifiers.types")

    class QueueClient(clients.Client):
        def __init__(self) -> None:
            super().__init__(None)
            self.requests: queue.SimpleQueue[_ModelRequest | None] = queue.SimpleQueue()
            self._response: asyncio.Future[Action] | None = None
            self._turns = 0

        def answer(self, action: Action) -> None:
            response = self._response
            assert response is not None
            response.get_loop().call_soon_threadsafe(response.set_result, action)

        def setup_client(self, config: Any) -> None:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
            return [_message(m) for m in messages], {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            self._response = asyncio.get_running_loop().create_future()
            self.requests.put((prompt, list(tools or ())))
            return await self._response

        async def raise_from_native_response(self, response: Any) -> None:
            """Do nothing: `get_native_response` never returns an error."""

        async def from_native_response(self, action: Any) -> Any:
            self._turns += 1
            calls = [
                types.ToolCall(id=c["id"], name=c["name"], arguments=c["arguments"]) for c in action.calls
            ]
            message = types.ResponseMessage(
                content=action.text,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return types.Response(id=f"turn-{self._turns}", created=0, model="policy", message=message)

        async def close(self) -> None:
            """Do nothing: the client has no resources."""

    return QueueClient


def _message(message: Any) -> Message:
    """Convert a message of the package to a chat message with text content and OpenAI's tool calls."""
    plain: Message = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain = {**plain, "content": "".join(part.get("text", "") for part in content)}
    calls = plain.get("tool_calls")
    if calls:
        tool_calls = [c if isinstance(c, dict) else json.loads(c) for c in calls]
        plain = {
            **plain,
            "tool_calls": [
                {
                    "id": c["id"],
                    "type": "function",
                    "function": {"name": c["name"], "arguments": c["arguments"]},
                }
                for c in tool_calls
                if "name" in c
            ],
        }
    return plain


make = VerifiersEnvironment
