"""AgentHost: client of the process from which agents are forked (host.py)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rlsys.agents import host as agents_host
from rlsys.agents.host import LENGTH
from rlsys.core.errors import UserError
from rlsys.core.process_pool import INHERITED_VARIABLES
from rlsys.venv_runner import run as venv_run

START_SECONDS = 120.0


@dataclass(frozen=True)
class AgentExit:
    """The exit of an agent.

    Attributes:
        error: message of its exception; None if it completed.
        kill_reason: what killed the agent, as a phrase after "killed"; empty if it was not killed.
    """

    error: str | None
    kill_reason: str = ""


_HOST_DIED = AgentExit(None, "with the process of all agents")


class AgentHost:
    """Client of a host. Owns the running agents. Not thread-safe: used by the tasks of one event loop.

    Attributes:
        host_exit: set when the host and all its agents have ended.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._running: dict[int, asyncio.Future[AgentExit]] = {}
        self._ids = itertools.count()
        self.host_exit = asyncio.Event()

    def start(
        self, task: Mapping[str, Any], seed: int, env: Mapping[str, str]
    ) -> tuple[int, asyncio.Future[AgentExit]]:
        """Start an agent, and return its number and a future of its exit."""
        agent, exit_future = next(self._ids), asyncio.get_running_loop().create_future()
        if self.host_exit.is_set():
            exit_future.set_result(_HOST_DIED)
        else:
            self._running[agent] = exit_future
            _write(self._writer, {"start": agent, "task": task, "seed": seed, "env": env})
        return agent, exit_future

    def kill(self, agent: int) -> None:
        """Kill an agent and its descendants, unless it has ended."""
        if agent in self._running and not self.host_exit.is_set():
            _write(self._writer, {"kill": agent})

    async def listen(self) -> None:
        """Receive the exits of agents until the host ends."""
        try:
            while (message := await _read(self._reader)) is not None:
                exit_future = self._running.pop(message["ended"])
                if not exit_future.done():
                    signal = message["signal"]
                    exit_future.set_result(
                        AgentExit(message["error"], f"by signal {signal}" if signal else "")
                    )
        finally:
            self.host_exit.set()
            for exit_future in self._running.values():
                if not exit_future.done():
                    exit_future.set_result(_HOST_DIED)


@asynccontextmanager
async def open_host(
    run: str | None,
    python: str | None,
    command: Sequence[str] | None,
    variables: Sequence[str],
    *,
    plays_episodes: bool = False,
) -> AsyncIterator[AgentHost]:
    """Start a host for a function or a command, and kill it with its agents when the context ends.

    Args:
        run: the function, as `file.py:function` or `module:function`; None with `command`.
        python: Python that imports `run`; None: this process's Python.
        command: program and its arguments, instead of `run`.
        variables: names of environment variables that agents inherit, in addition to INHERITED_VARIABLES.
        plays_episodes: whether the function plays episodes of several policies.

    Raises:
        UserError: the function, the Python or the program does not exist.
    """
    for field, program in (("python", python), ("command", command[0] if command else None)):
        if program is not None and shutil.which(program) is None:
            raise UserError(
                f"rollout.generator_params.{field} = {program!r}: expected a program on PATH, or its path"
            )
    variable_names = {*INHERITED_VARIABLES, *variables}
    env = {name: value for name, value in os.environ.items() if name in variable_names}
    if python is None and command is None:
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    process, reader, writer = await _start_process(python or sys.executable, env)
    try:
        function = {"run": run} | ({"episodes": True} if plays_episodes else {})
        _write(writer, function if command is None else {"command": list(command)})
        async with asyncio.timeout(START_SECONDS):
            message = await _read(reader)
        if message is None or "error" in message:
            no_start = "rollout.generator = 'agent': the process of the agents exited before it was ready"
            raise UserError(message["error"] if message else no_start)
        host = AgentHost(reader, writer)
        listening = asyncio.create_task(host.listen())
        try:
            yield host
        finally:
            listening.cancel()
    finally:
        writer.transport.abort()  # ends the host and all agents
        await process.wait()


async def _start_process(
    python: str, env: Mapping[str, str]
) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Start the process of a host, and return it and the streams of its channel."""
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
        process = await asyncio.create_subprocess_exec(
            python, venv_run.__file__, agents_host.__name__,
            stdin=child_socket.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )  # fmt: skip
    reader, writer = await asyncio.open_connection(sock=parent_socket)
    return process, reader, writer


def _write(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    data = json.dumps(message, default=str).encode()
    writer.write(LENGTH.pack(len(data)) + data)


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Read the next message; None at the end of the stream."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        message: dict[str, Any] = json.loads(await reader.readexactly(length))
    except (ConnectionError, asyncio.IncompleteReadError):
        return None
    return message
