"""Connector of MCP: the model calls the tools of a server, and ends the episode by a turn without a call, its answer.

For each episode the connector starts the server `command`, or opens a session of the server at `url` (streamable
HTTP). The run's `data.reward` scores the answer. Alternatively, the tool `reward_tool` scores it: it is hidden from
the model, gets the arguments `answer` and `task` (JSON) at the end, and returns the reward as text.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.connectors.loop_thread import LoopThread
from rlsys.environments.contract import Action, Message, Opening, Step


class MCPEnvironment:
    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        reward_tool: str | None = None,
        system: str = "",
    ) -> None:
        """Check the arguments; servers start with their episodes.

        Args:
            command: program of a server, with its arguments.
            url: address of a server, instead of `command`.
            env: environment variables of `command`, in addition to RLSYS_SEED.
            reward_tool: name of the tool that returns the reward; None: no such tool.
            system: system message; empty: none.

        Raises:
            ValueError: both or none of command and url are set.
        """
        if (command is None) == (url is None):
            raise ValueError(f"command = {command!r}, url = {url!r}: expected exactly one of them")
        self._mcp: Any = importlib.import_module("mcp")
        self._command, self._url, self._env = command, url, env
        self._reward_tool, self._system = reward_tool, system
        self._loop = LoopThread()

    def open(self, task: Mapping[str, Any], seed: int) -> MCPEpisode:
        if self._command is None:
            target: Any = self._url
        else:
            env = {**dict(self._env or {}), "RLSYS_SEED": str(seed)}
            target = self._mcp.stdio_client(
                self._mcp.StdioServerParameters(
                    command=self._command[0], args=list(self._command[1:]), env=env
                )
            )
        return MCPEpisode(self._loop, self._mcp.Client(target), task, self._reward_tool, self._system)


class MCPEpisode:
    """A session with a server. One task of the event loop enters and exits the client, as the package requires."""

    def __init__(
        self, loop: LoopThread, client: Any, task: Mapping[str, Any], reward_tool: str | None, system: str
    ) -> None:
        self._loop, self._client, self._task, self._reward_tool = loop, client, task, reward_tool
        self._closing: asyncio.Event | None = None
        self._client_task: asyncio.Task[None] | None = None
        tools = loop.run(self._begin())
        schemas = [_schema(tool) for tool in tools if tool.name != reward_tool]
        system_messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages = [{"role": "user", "content": str(task.get("question", ""))}]
        self.opening = Opening([*system_messages, *messages], schemas)

    async def _begin(self) -> list[Any]:
        """Enter the client, and return the server's tools."""
        self._closing, entered = asyncio.Event(), asyncio.get_running_loop().create_future()
        self._client_task = asyncio.create_task(self._run_client(entered))
        await entered
        return list((await self._client.list_tools()).tools)

    async def _run_client(self, entered: asyncio.Future[None]) -> None:
        """Keep the client entered until `close`. `entered`: gets None, or the exception on entering."""
        assert self._closing is not None
        try:
            async with self._client:
                entered.set_result(None)
                await self._closing.wait()
        except Exception as e:
            if entered.done():
                raise
            entered.set_exception(e)

    def step(self, action: Action) -> Step:
        if not action.calls:
            reward = 0.0
            if self._reward_tool is not None:
                arguments = {"answer": action.text, "task": json.dumps(dict(self._task), default=str)}
                reward = float(self._loop.run(self._call(self._reward_tool, arguments)))
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
        """Call a tool and return its text; for an invalid call, a line that starts with `error`."""
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            return f"error: the arguments of {call['name']} are not JSON"
        if not isinstance(arguments, dict) or call["name"] == self._reward_tool:
            return f"error: no tool {call['name']} accepts these arguments"
        return str(self._loop.run(self._call(call["name"], arguments)))

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._client.call_tool(name, arguments)
        text = "\n".join(str(part.text) for part in result.content if hasattr(part, "text"))
        return f"error: {text}" if result.is_error else text

    def close(self) -> None:
        async def end() -> None:
            assert self._closing is not None and self._client_task is not None
            self._closing.set()
            await asyncio.wait([self._client_task], timeout=10)

        self._loop.run(end())


def _schema(tool: Any) -> dict[str, Any]:
    """Convert a tool to the schema of chat templates."""
    schema = tool.input_schema
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": schema},
    }


make = MCPEnvironment
