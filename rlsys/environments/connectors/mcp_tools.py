"""MCP: the tools of a server. The model calls them, and its turn without a call is its answer.

A server is a `command`, started for each episode, or a `url` (streamable HTTP), with a session for each. What an
answer is worth, the run's `data.reward` says. `reward_tool` names a tool that is hidden from the model and asked at
the end, with the answer as `answer` and the task as `task`: its text is a number.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.connectors.waiting import LoopThread
from rlsys.environments.contract import Action, Message, Opening, Step


class Servers:
    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        reward_tool: str | None = None,
        system: str = "",
    ) -> None:
        """`system`: said before the question."""
        if (command is None) == (url is None):
            raise ValueError("command, url: expected one of them")
        self._mcp: Any = importlib.import_module("mcp")
        self._command, self._url, self._env = command, url, env
        self._reward_tool, self._system = reward_tool, system
        self._loop = LoopThread()

    def open(self, task: Mapping[str, Any], seed: int) -> Session:
        if self._command is None:
            target: Any = self._url
        else:
            env = {**dict(self._env or {}), "RLSYS_SEED": str(seed)}
            target = self._mcp.stdio_client(
                self._mcp.StdioServerParameters(
                    command=self._command[0], args=list(self._command[1:]), env=env
                )
            )
        return Session(self._loop, self._mcp.Client(target), task, self._reward_tool, self._system)


class Session:
    """Its client is entered and left by one task of the loop, as the package asks for."""

    def __init__(
        self, loop: LoopThread, client: Any, task: Mapping[str, Any], reward_tool: str | None, system: str
    ) -> None:
        self._loop, self._client, self._task, self._reward_tool = loop, client, task, reward_tool
        self._ending: asyncio.Event | None = None
        self._held: asyncio.Task[None] | None = None
        tools = loop.run(self._begin())
        shown = [_schema(tool) for tool in tools if tool.name != reward_tool]
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        asked = [{"role": "user", "content": str(task.get("question", ""))}]
        self.opening = Opening([*first, *asked], shown)

    async def _begin(self) -> list[Any]:
        self._ending, entered = asyncio.Event(), asyncio.get_running_loop().create_future()
        self._held = asyncio.create_task(self._hold(entered))
        await entered
        return list((await self._client.list_tools()).tools)

    async def _hold(self, entered: asyncio.Future[None]) -> None:
        assert self._ending is not None
        try:
            async with self._client:
                entered.set_result(None)
                await self._ending.wait()
        except Exception as e:
            if entered.done():
                raise
            entered.set_exception(e)

    def step(self, action: Action) -> Step:
        if not action.calls:
            reward = 0.0
            if self._reward_tool is not None:
                asked = {"answer": action.text, "task": json.dumps(dict(self._task), default=str)}
                reward = float(self._loop.run(self._call(self._reward_tool, asked)))
            return Step(reward=reward, done=True)
        answers = [self._answer(call) for call in action.calls]
        return Step(
            [
                {
                    "role": "tool",
                    "tool_call_id": call.get("id", ""),
                    "name": call["name"],
                    "content": answer,
                }
                for call, answer in zip(action.calls, answers, strict=True)
            ]
        )

    def _answer(self, call: Mapping[str, Any]) -> str:
        """What the model did wrong is an answer, too: a line that begins with `error`."""
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            return f"error: the arguments of {call['name']} are no JSON"
        if not isinstance(arguments, dict) or call["name"] == self._reward_tool:
            return f"error: there is no tool {call['name']} that takes this"
        return str(self._loop.run(self._call(call["name"], arguments)))

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        found = await self._client.call_tool(name, arguments)
        text = "\n".join(str(part.text) for part in found.content if hasattr(part, "text"))
        return f"error: {text}" if found.is_error else text

    def close(self) -> None:
        async def end() -> None:
            assert self._ending is not None and self._held is not None
            self._ending.set()
            await asyncio.wait([self._held], timeout=10)

        self._loop.run(end())


def _schema(tool: Any) -> dict[str, Any]:
    """As chats offer it."""
    schema = tool.input_schema
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": schema},
    }


make = Servers
