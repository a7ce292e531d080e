"""Agents behind a URL: a service that runs one for each request, in a venv or a container of its own.

    POST {"task": {...}, "seed": n, "env": {"OPENAI_BASE_URL": ..., "OPENAI_API_KEY": ..., ...}}

The answer comes when the agent has ended: status 200, or what went wrong as another one. A service that closes the
connection has lost its agent, which is then run again; when we close it, the agent is to be ended. One that is not
there may be starting anew: it is asked until it is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rlsys.agents.hosting import Ended
from rlsys.http_server.clients import direct_session, read_bounded

CONNECT_SECONDS = 10.0
PAUSE_SECONDS = 1.0
"""Before a service is asked again, or its lost agent run again."""
AWAY_SECONDS = 60.0
"""So long a service may be away before an agent that it never got counts as lost."""
LONGEST_WORDS = 300
MOST_BYTES = 2**20


class AgentService:
    """In the place of hosting.AgentHost; belongs to one event loop. Through no proxy, and to no other address."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ids = itertools.count()
        self.lost = asyncio.Event()  # never: each request stands for itself

    def start(
        self, task: Mapping[str, Any], seed: int, env: Mapping[str, str]
    ) -> tuple[int, asyncio.Future[Ended]]:
        """Start an agent: its number, and how it will have ended."""
        agent, ended = next(self._ids), asyncio.get_running_loop().create_future()
        body = {"task": dict(task), "seed": seed, "env": dict(env)}
        running = self._running[agent] = asyncio.create_task(self._ask(body, ended))
        running.add_done_callback(lambda _: self._running.pop(agent))
        return agent, ended

    def kill(self, agent: int) -> None:
        """Close its connection. Nothing when it has ended."""
        if agent in self._running:
            self._running[agent].cancel()

    async def _ask(self, body: dict[str, Any], ended: asyncio.Future[Ended]) -> None:
        try:
            async with self._there(body) as answer:
                words = (await read_bounded(answer, MOST_BYTES)).decode(errors="replace").split()
                said = " ".join(words)[:LONGEST_WORDS]
                error = None if answer.status == 200 else f"its service answered {answer.status} {said}"
                end = Ended(error)
        except (aiohttp.ClientError, OSError) as e:
            await asyncio.sleep(PAUSE_SECONDS)
            end = Ended(None, f"its service at {self._url} is gone: {type(e).__name__}")
        if not ended.done():
            ended.set_result(end)

    @asynccontextmanager
    async def _there(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Its answer to the task. Raises what the connection raised, at last."""
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
