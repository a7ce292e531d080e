"""Agents behind a URL: a service that runs one for each request, in its own venv or container.

    POST {"task": {...}, "seed": n, "env": {"OPENAI_BASE_URL": ..., "OPENAI_API_KEY": ..., ...}}

The answer comes when the agent has ended: status 200, or another one with the error. A service that closes the
connection has lost its agent, which is then run again; when rlsys closes it, the service has to end the agent. An
unreachable service may be restarting: requests are repeated for a while.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rlsys.agents.hosting import AgentExit
from rlsys.http_server.clients import direct_session, read_bounded

CONNECT_SECONDS = 10.0
PAUSE_SECONDS = 1.0
"""Pause before a request is repeated, or a lost agent is run again."""
AWAY_SECONDS = 60.0
"""Maximum time that a service is unreachable before its agent counts as lost."""
MAX_MESSAGE_CHARACTERS = 300
MAX_ANSWER_BYTES = 2**20


class AgentService:
    """Client of a service, with the interface of hosting.AgentHost. Belongs to one event loop.

    Uses no proxy, and follows no redirect.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ids = itertools.count()
        self.host_exit = asyncio.Event()  # never set: requests are independent

    def start(
        self, task: Mapping[str, Any], seed: int, env: Mapping[str, str]
    ) -> tuple[int, asyncio.Future[AgentExit]]:
        """Start an agent. Returns its number, and the future of its end."""
        agent, exit_future = next(self._ids), asyncio.get_running_loop().create_future()
        body = {"task": dict(task), "seed": seed, "env": dict(env)}
        running = self._running[agent] = asyncio.create_task(self._run_agent(body, exit_future))
        running.add_done_callback(lambda _: self._running.pop(agent))
        return agent, exit_future

    def kill(self, agent: int) -> None:
        """Close the agent's connection, unless it has ended."""
        if agent in self._running:
            self._running[agent].cancel()

    async def _run_agent(self, body: dict[str, Any], exit_future: asyncio.Future[AgentExit]) -> None:
        try:
            async with self._post(body) as answer:
                fragments = (await read_bounded(answer, MAX_ANSWER_BYTES)).decode(errors="replace").split()
                message = " ".join(fragments)[:MAX_MESSAGE_CHARACTERS]
                error = None if answer.status == 200 else f"its service answered {answer.status} {message}"
                end = AgentExit(error)
        except (aiohttp.ClientError, OSError) as e:
            await asyncio.sleep(PAUSE_SECONDS)
            end = AgentExit(None, f"its service at {self._url} is gone: {type(e).__name__}")
        if not exit_future.done():
            exit_future.set_result(end)

    @asynccontextmanager
    async def _post(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the task, and wait for an unreachable service. Raises the last connection error."""
        loop = asyncio.get_running_loop()
        until = loop.time() + AWAY_SECONDS
        while True:
            try:
                answer = await self._session.post(self._url, json=body, allow_redirects=False)
                break
            except aiohttp.ClientConnectorError:
                if loop.time() >= until:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)
        async with answer:
            yield answer


@asynccontextmanager
async def open_service(url: str) -> AsyncIterator[AgentService]:
    times = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)  # an agent may take hours
    connector = aiohttp.TCPConnector(limit=0)
    async with direct_session(timeout=times, connector=connector) as session:
        yield AgentService(url, session)
