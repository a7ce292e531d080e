"""AgentService: client of a service that runs one agent per request, in its own venv or container.

    POST {"task": {...}, "seed": n, "env": {"OPENAI_BASE_URL": ..., "OPENAI_API_KEY": ..., ...}}

The service responds after the agent has ended, with status 200 if it succeeded, or with another status and the error.
If the service closes the connection, the agent counts as killed and runs again. If rlsys closes the connection, the
service must end the agent. Requests to an unreachable service are repeated for UNREACHABLE_SECONDS, because the
service may be restarting.
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
"""Pause in seconds before a request is repeated, or a killed agent is run again."""
UNREACHABLE_SECONDS = 60.0
"""Seconds for which a service may be unreachable before its agent counts as killed."""
MAX_MESSAGE_CHARACTERS = 300
MAX_ANSWER_BYTES = 2**20


class AgentService:
    """Client of a service, with the interface of hosting.AgentHost. Belongs to one event loop.

    It uses no proxy and follows no redirects.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ids = itertools.count()
        self.host_exit = asyncio.Event()  # never set: requests are independent

    def start(
        self, task: Mapping[str, Any], seed: int, env: Mapping[str, str]
    ) -> tuple[int, asyncio.Future[AgentExit]]:
        """Start an agent, and return its number and a future of its exit."""
        agent, exit_future = next(self._ids), asyncio.get_running_loop().create_future()
        body = {"task": dict(task), "seed": seed, "env": dict(env)}
        running = self._running[agent] = asyncio.create_task(self._run_agent(body, exit_future))
        running.add_done_callback(lambda _: self._running.pop(agent))
        return agent, exit_future

    def kill(self, agent: int) -> None:
        """Close the connection of an agent, unless the agent has ended."""
        if agent in self._running:
            self._running[agent].cancel()

    async def _run_agent(self, body: dict[str, Any], exit_future: asyncio.Future[AgentExit]) -> None:
        """Send a task, and set the future when the agent has ended."""
        try:
            async with self._post(body) as answer:
                text = (await read_bounded(answer, MAX_ANSWER_BYTES)).decode(errors="replace")
                error = None
                if answer.status != 200:
                    message = " ".join(text.split())[:MAX_MESSAGE_CHARACTERS]
                    error = f"the agent's service returned HTTP {answer.status}: {message}"
                end = AgentExit(error)
        except (aiohttp.ClientError, OSError) as e:
            await asyncio.sleep(PAUSE_SECONDS)
            end = AgentExit(None, f"because the service at {self._url} does not respond: {type(e).__name__}")
        if not exit_future.done():
            exit_future.set_result(end)

    @asynccontextmanager
    async def _post(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the task, and yield the response. Repeat the request while the service is unreachable.

        Raises:
            aiohttp.ClientConnectorError: the service was unreachable for UNREACHABLE_SECONDS.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + UNREACHABLE_SECONDS
        while True:
            try:
                answer = await self._session.post(self._url, json=body, allow_redirects=False)
                break
            except aiohttp.ClientConnectorError:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)
        async with answer:
            yield answer


@asynccontextmanager
async def open_service(url: str) -> AsyncIterator[AgentService]:
    """Open a client of the service at `url` while the context is active."""
    times = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)  # an agent may take hours
    connector = aiohttp.TCPConnector(limit=0)
    async with direct_session(timeout=times, connector=connector) as session:
        yield AgentService(url, session)
