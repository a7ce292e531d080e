"""Our end of the process that agents are forked from (host.py): starts it, starts agents, hears how they end."""

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
class Ended:
    """`error`: what it raised, in words; None when it came to its end. `lost`: what killed it, in words; empty for
    nothing."""

    error: str | None
    lost: str = ""


_HOST_DIED = Ended(None, "with the process of all agents")


class AgentHost:
    """Belongs to one event loop. Owns who still runs; `lost` when the host has ended, and its agents with it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._running: dict[int, asyncio.Future[Ended]] = {}
        self._ids = itertools.count()
        self.lost = asyncio.Event()

    def start(
        self, task: Mapping[str, Any], seed: int, env: Mapping[str, str]
    ) -> tuple[int, asyncio.Future[Ended]]:
        """Start an agent: its number, and how it will have ended."""
        agent, ended = next(self._ids), asyncio.get_running_loop().create_future()
        if self.lost.is_set():
            ended.set_result(_HOST_DIED)
        else:
            self._running[agent] = ended
            _write(self._writer, {"start": agent, "task": task, "seed": seed, "env": env})
        return agent, ended

    def kill(self, agent: int) -> None:
        """It, and all that it has started. Nothing when it has ended."""
        if agent in self._running and not self.lost.is_set():
            _write(self._writer, {"kill": agent})

    async def listen(self) -> None:
        """Until the host ends."""
        try:
            while (said := await _read(self._reader)) is not None:
                ended = self._running.pop(said["ended"])
                if not ended.done():
                    signal = said["signal"]
                    ended.set_result(Ended(said["error"], f"by signal {signal}" if signal else ""))
        finally:
            self.lost.set()
            for ended in self._running.values():
                if not ended.done():
                    ended.set_result(_HOST_DIED)


@asynccontextmanager
async def open_host(
    run: str | None,
    python: str | None,
    command: Sequence[str] | None,
    variables: Sequence[str],
    *,
    meets: bool = False,
) -> AsyncIterator[AgentHost]:
    """A host for the function `run` in `python` (None: ours, with the packages of ours), or for a command.
    `variables`: of our environment, what agents may see beside what programs need. `meets`: the function plays
    episodes of several policies. Raises UserError for a function, a Python or a program that does not exist."""
    for field, program in (("python", python), ("command", command[0] if command else None)):
        if program is not None and shutil.which(program) is None:
            raise UserError(f"rollout.generator_params.{field} = {program!r} is no program")
    ours, theirs = socket.socketpair()
    named = {*INHERITED_VARIABLES, *variables}
    env = {name: value for name, value in os.environ.items() if name in named}
    if python is None and command is None:
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            python or sys.executable, venv_run.__file__, agents_host.__name__,
            stdin=theirs.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )  # fmt: skip
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        function = {"run": run} | ({"meets": True} if meets else {})
        _write(writer, function if command is None else {"command": list(command)})
        async with asyncio.timeout(START_SECONDS):
            said = await _read(reader)
        if said is None or "error" in said:
            raise UserError(
                said["error"] if said else "rollout.generator = 'agent': its process did not start"
            )
        host = AgentHost(reader, writer)
        listening = asyncio.create_task(host.listen())
        try:
            yield host
        finally:
            listening.cancel()
    finally:
        writer.transport.abort()  # ends the host, which takes all agents along
        await process.wait()


def _write(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    data = json.dumps(message, default=str).encode()
    writer.write(LENGTH.pack(len(data)) + data)


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        said: dict[str, Any] = json.loads(await reader.readexactly(length))
    except (ConnectionError, asyncio.IncompleteReadError):
        return None
    return said
