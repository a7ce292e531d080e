"""verifiers (0.1): an environment of one or several turns, with its tools and its rubric.

Its own rollout runs in a thread's event loop, and its client is this file: what it asks is what the model reads,
and a turn of the model is the client's answer. So its stop conditions, tools and rewards are the package's. A
task's `example`, or else the seed, chooses a row of its data set.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import json
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.connectors.waiting import LoopThread
from rlsys.environments.contract import Action, Message, Opening, Step

_Asked = tuple[list[Message], list[dict[str, Any]]]


class Chats:
    def __init__(self, load: str, args: Mapping[str, Any] | None = None) -> None:
        """`load`: `package.module:load_environment`, `path/to/file.py:load_environment`, or an environment's name."""
        package: Any = importlib.import_module("verifiers")
        self._package, self._client = package, _client_class(package)
        if ":" in load:
            from rlsys.environments.serve import find

            self._made = find(load)(**dict(args or {}))
        else:
            self._made = package.load_environment(load, **dict(args or {}))
        self._rows = self._made.get_dataset()
        self._loop = LoopThread()

    def open(self, task: Mapping[str, Any], seed: int) -> Chat:
        row = dict(self._rows[int(task.get("example", seed)) % len(self._rows)])
        client = self._client()
        work = self._made.run_rollout(row, client, "policy", {})
        return Chat(client, self._loop.begin(work))


class Chat:
    def __init__(self, client: Any, ended: concurrent.futures.Future[Any]) -> None:
        self._client, self._ended = client, ended
        ended.add_done_callback(lambda _: client.asked.put(None))
        asked = self._next()
        if asked is None:
            raise RuntimeError(f"it ended before the model's first turn: {self._reward()}")
        self._read, tools = asked
        self.opening = Opening(self._read, tools)

    def _next(self) -> _Asked | None:
        """What the environment asks the model next; None: it has ended."""
        found: _Asked | None = self._client.asked.get()
        return found

    def step(self, action: Action) -> Step:
        before = len(self._read)
        self._client.answer(action)
        asked = self._next()
        if asked is None:
            reward, right = self._reward()
            return Step(reward=reward, done=True, right=right)
        self._read, _ = asked
        return Step(self._read[before + 1 :])

    def _reward(self) -> tuple[float, bool]:
        output = self._ended.result()
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        return float(output["reward"]), float(output["reward"]) >= 1

    def close(self) -> None:
        self._ended.cancel()


def _client_class(package: Any) -> Any:
    """A client of the package that asks whoever takes from `asked`."""
    clients: Any = importlib.import_module("verifiers.clients")
    types: Any = importlib.import_module("verifiers.types")

    class Asking(clients.Client):
        def __init__(self) -> None:
            super().__init__(None)
            self.asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
            self._waiting: asyncio.Future[Action] | None = None
            self._turns = 0

        def answer(self, action: Action) -> None:
            waiting = self._waiting
            assert waiting is not None
            waiting.get_loop().call_soon_threadsafe(waiting.set_result, action)

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
            self._waiting = asyncio.get_running_loop().create_future()
            self.asked.put((prompt, list(tools or ())))
            return await self._waiting

        async def raise_from_native_response(self, response: Any) -> None:
            """It is ours."""

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
            """Nothing is held."""

    return Asking


def _message(message: Any) -> Message:
    """A plain chat message of the package's own."""
    found: Message = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = found.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        found = {**found, "content": "".join(part.get("text", "") for part in content)}
    calls = found.get("tool_calls")
    if calls:
        made = [c if isinstance(c, dict) else json.loads(c) for c in calls]
        found = {
            **found,
            "tool_calls": [
                {
                    "id": c["id"],
                    "type": "function",
                    "function": {"name": c["name"], "arguments": c["arguments"]},
                }
                for c in made
                if "name" in c
            ],
        }
    return found


make = Chats
