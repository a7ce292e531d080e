"""Services: starts environments in separate processes (rlsys/environments), and restarts them.

A service listens on a socket that this process owns. Its address therefore stays the same after a restart, and
requests wait in the socket's queue until then. The clients replay the lost episodes turn by turn
(rlsys/environments/client.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Self

import aiohttp
import msgspec
from pydantic import Field, model_validator

from rlsys.config.section import Positive, Seconds, Section
from rlsys.core.errors import UserError
from rlsys.core.process_pool import INHERITED_VARIABLES
from rlsys.core.sockets import role_folder
from rlsys.environments import client as environment_client
from rlsys.environments import serve
from rlsys.environments.client import EnvironmentFailed, RemoteEpisode
from rlsys.http_server.clients import direct_session, read_bounded
from rlsys.venv_runner import run

START_SECONDS = 120.0
PROBES, PROBE_PART = 6, 3
"""Number of health checks per `step_seconds`, and the number by which `step_seconds` is divided for a check's time
limit. A service that hangs is restarted before the requests of its clients time out."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a restart: initially, and the maximum. Each death within STEADY_SECONDS doubles the pause."""
STEADY_SECONDS = 60.0
MAX_THREADS = 256
"""Largest number of concurrent requests."""

log = logging.getLogger("rlsys.rollout")


class ServiceParams(Section):
    """Location of environments: processes that this run starts, or an external service."""

    connector: str | None = None
    """gymnasium, reasoning_gym, mcp, verifiers, openenv, or a function `path/to/file.py:function` or
    `package.module:function` that returns an Environment (rlsys/environments/contract.py)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the connector."""
    python: str | None = None
    """Python of a venv that has the environment's package; it need not have rlsys. Unset: the run's own Python."""
    processes: Positive = 1
    """Number of processes that share the episodes."""
    leases: Positive = 256
    """Largest number of concurrent episodes of a process; others wait."""
    env: list[str] = Field(default_factory=list)
    """Names of environment variables that the processes get, in addition to the few that programs need."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """URL of a service with the protocol of rlsys/environments/serve.py, instead of a connector.
    RLSYS_ENVIRONMENT_KEY has its key."""
    step_seconds: Seconds = 60.0
    """Time limit of a step, and of waiting for an unreachable service. Afterwards the sample is censored."""
    idle_seconds: Seconds = 3600.0
    """Seconds without a step after which an episode is closed. An episode that continues later is replayed."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.connector is None) == (self.url is None):
            raise ValueError(
                f"connector = {self.connector!r}, url = {self.url!r}: expected exactly one of them"
            )
        if (
            self.connector is not None
            and ":" not in self.connector
            and self.connector not in serve.CONNECTORS
        ):
            raise ValueError(
                f"connector = {self.connector!r}: expected one of {', '.join(serve.CONNECTORS)}, or "
                "path/to/file.py:function"
            )
        return self

    @property
    def name(self) -> str:
        """Name of the environment, for errors."""
        return self.connector or self.url or ""


class AgentEnvironment:
    """Forwards an agent's requests to an environment. Owns the agent's lease.

    An agent has at most one lease, so that it cannot use up the leases of others. After a step that hangs, the agent
    gets no new lease, because the step occupies a thread of the service.
    """

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        self._service, self._session = service, session
        self._name = secrets.token_urlsafe(16)
        """Prefix of the agent's lease ids, which differ thereby from those of other agents."""
        self._lease = ""
        self._steps = 0
        """Number of running steps."""
        self._hangs = False
        """Whether a lease was closed while its step was running."""

    async def request(self, call: str, body: bytes) -> tuple[int, bytes]:
        """Forward a request of the agent, and return the HTTP status and the body of the response.

        Args:
            call: "open", "step" or "close".
            body: JSON of the request.

        Raises:
            ConnectionError: the service died.
        """
        try:
            question = msgspec.json.decode(body, type=dict[str, Any])
            lease = f"{self._name}-{question['lease']}"
        except (msgspec.DecodeError, KeyError, RecursionError) as e:
            return _refusal(400, f'body: expected a JSON object with "lease": {type(e).__name__}: {e}')
        if call == "open":
            if self._hangs:
                return _refusal(403, "an earlier step of this agent hangs; the agent cannot open an episode")
            if lease != self._lease:
                await self.close()
            self._lease = lease
        elif lease != self._lease:
            return _refusal(404, f"lease {question['lease']} does not exist")
        if call == "close":
            await self.close()
            return 200, b"{}"
        self._steps += call == "step"
        try:
            return await self._forward(call, {**question, "lease": lease})
        finally:
            self._steps -= call == "step"

    async def close(self) -> None:
        """Release the agent's lease."""
        lease, self._lease = self._lease, ""
        self._hangs |= self._steps > 0
        if lease:
            with contextlib.suppress(ConnectionError):
                await self._forward("close", {"lease": lease})

    async def _forward(self, call: str, question: dict[str, Any]) -> tuple[int, bytes]:
        post = self._session.post(f"{self._service.address}/{call}", json=question, allow_redirects=False)
        try:
            async with post as answer:
                return answer.status, await read_bounded(answer, environment_client.MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError) as e:
            raise ConnectionError(f"{self._service.address}/{call}: {type(e).__name__}: {e}") from None


def _refusal(status: int, reason: str) -> tuple[int, bytes]:
    return status, msgspec.json.encode({"error": reason})


class Service:
    """A process with environments, or an external service.

    Args:
        params: location of the environments.
        key: key of the service.
        listening: the listening socket of the process; None: an external service.

    Attributes:
        url: URL for RemoteEpisode.
        address: URL for aiohttp, which requires a host name also for a Unix socket.
        episodes: number of current users.
        starts: number of starts of the process.
    """

    def __init__(self, params: ServiceParams, key: str, listening: socket.socket | None) -> None:
        self._params, self.key, self._listening = params, key, listening
        self.url = params.url or "" if listening is None else f"unix:{listening.getsockname()}"
        self.address = self.url if listening is None else "http://localhost"
        self.episodes = 0
        self.starts = 0

    async def keep(self, ready: asyncio.Future[None]) -> None:
        """Run the process, and restart it when it exits, until this call is cancelled.

        Args:
            ready: completed by the first start; gets a UserError if the start fails.
        """
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE
        while True:
            start = loop.time()
            try:
                async with self._process() as process:
                    self.starts += 1
                    if not ready.done():
                        ready.set_result(None)
                    await self._watch(process)
            except (UserError, OSError) as e:  # OSError: the machine cannot start another process
                error = e
                if isinstance(e, OSError):
                    error = UserError(f"the environment {self._params.name}: {e}")
                if not ready.done():
                    ready.set_exception(error)
                    return
                log.warning("%s", error)
            pause = FIRST_PAUSE if loop.time() - start > STEADY_SECONDS else min(2 * pause, LONGEST_PAUSE)
            log.warning("the environment %s has exited; restarting it in %.1f s", self._params.name, pause)
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run the process while the context is active.

        Raises:
            UserError: the process does not start.
        """
        assert self._listening is not None
        p = self._params
        allowed = {*INHERITED_VARIABLES, *p.env}
        env = {name: value for name, value in os.environ.items() if name in allowed}
        python = p.python or sys.executable
        if shutil.which(python) is None:
            raise UserError(
                f"the environment {p.name}: python = {python!r}: expected a program on PATH, or its path"
            )
        process = await asyncio.create_subprocess_exec(
            python, "-u", run.__file__, serve.__name__, _absolute(p.connector or ""),
            "--params", json.dumps(p.params), "--socket", str(self._listening.fileno()),
            "--leases", str(p.leases), "--idle", str(p.idle_seconds),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**env, serve.KEY: self.key},
            pass_fds=[self._listening.fileno()],
            start_new_session=True,
        )  # fmt: skip
        try:
            await self._wait_ready(process)
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, 9)
            await process.wait()

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the process has created its environment.

        Raises:
            UserError: the process reports an error, exits, or takes more than START_SECONDS.
        """
        assert process.stdout is not None
        name = self._params.name
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        except TimeoutError:
            raise UserError(f"the environment {name} did not start within {START_SECONDS:g} s") from None
        status = (
            json.loads(line)
            if line.strip()
            else {"error": "the process exited before it was ready; see the log"}
        )
        if "error" in status:
            raise UserError(f"the environment {name}: {status['error']}")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the process ends, or does not respond to a health check."""
        exit_task = asyncio.ensure_future(process.wait())
        try:
            while True:
                done, _ = await asyncio.wait([exit_task], timeout=self._params.step_seconds / PROBES)
                if done:
                    return
                if not await self._is_responding():
                    log.warning("the environment %s does not respond; killing it", self._params.name)
                    return
        finally:
            exit_task.cancel()

    def session(self, seconds: float) -> aiohttp.ClientSession:
        """Create an HTTP session for this service. `seconds`: time limit of a request."""
        unix = self._listening is not None
        return direct_session(
            connector=aiohttp.UnixConnector(self.url.removeprefix("unix:")) if unix else None,
            timeout=aiohttp.ClientTimeout(total=seconds),
            headers={"Authorization": f"Bearer {self.key}"},
        )

    async def _is_responding(self) -> bool:
        """Return whether the service responds to a health check."""
        try:
            async with (
                self.session(self._params.step_seconds / PROBE_PART) as session,
                session.get(f"{self.address}/health", allow_redirects=False) as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is one
            return False


class Services:
    """Runs environments. Owns their processes, from the first episode until `close` or the end of the event loop."""

    def __init__(self, params: ServiceParams, field: str) -> None:
        """Create services. The first episode starts them.

        Args:
            params: location of the environments.
            field: config field of `params`, for errors.
        """
        self._params, self._field = params, field
        self._services: list[Service] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._start_task: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(params.leases * params.processes)
        self._threads = concurrent.futures.ThreadPoolExecutor(
            min(MAX_THREADS, params.leases * params.processes), thread_name_prefix="environment"
        )

    @property
    def restarts(self) -> int:
        """Number of restarts of processes."""
        return sum(max(0, service.starts - 1) for service in self._services)

    @asynccontextmanager
    async def service(self) -> AsyncIterator[Service]:
        """Reserve the service with the fewest episodes while the context is active.

        Raises:
            UserError: a service does not start.
        """
        await self._start()
        async with self._slots:
            service = min(self._services, key=lambda s: s.episodes)
            service.episodes += 1
            try:
                yield service
            finally:
                service.episodes -= 1

    @asynccontextmanager
    async def agent_environment(self) -> AsyncIterator[AgentEnvironment]:
        """Reserve a service for one agent while the context is active.

        Raises:
            UserError: a service does not start.
        """
        async with self.service() as service, service.session(self._params.step_seconds) as session:
            environment = AgentEnvironment(service, session)
            try:
                yield environment
            finally:
                await environment.close()

    @asynccontextmanager
    async def episode(self, task: Mapping[str, Any], seed: int) -> AsyncIterator[LeasedEpisode]:
        """Open an episode while the context is active.

        Raises:
            EnvironmentFailed: the environment fails.
            UserError: a service does not start.
        """
        async with self.service() as service:
            open_episode = functools.partial(
                RemoteEpisode, service.url, service.key, task, seed, self._params.step_seconds
            )
            opening = self._in_thread(open_episode)
            try:
                remote: RemoteEpisode = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(self._close_episode)
                raise
            try:
                yield LeasedEpisode(remote, self._in_thread)
            finally:
                self._close_episode(opening)

    def _in_thread(self, call: Any) -> asyncio.Future[Any]:
        """Run a blocking call in a thread, and return its future."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _close_episode(self, opening: asyncio.Future[RemoteEpisode]) -> None:
        """Start to close the episode of a completed future, and cancel its retries, unless it failed to open."""
        if not opening.cancelled() and opening.exception() is None:
            remote = opening.result()
            remote.cancelled = True
            self._threads.submit(remote.close)

    async def _start(self) -> None:
        """Start the services in the first call, and wait until they are ready."""
        if self._start_task is None:  # a separate task, because the first caller may be cancelled
            self._start_task = asyncio.create_task(self._start_services(), name="environments")
        await asyncio.shield(self._start_task)

    async def _start_services(self) -> None:
        if self._params.url is not None:
            self._services = [Service(self._params, os.environ.get(environment_client.KEY, ""), None)]
            return
        waits: list[asyncio.Future[None]] = []
        for _ in range(self._params.processes):
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(role_folder() / f"environment-{secrets.token_hex(4)}"))
            listening.listen(1024)
            service = Service(self._params, secrets.token_urlsafe(32), listening)
            waits.append(asyncio.get_running_loop().create_future())
            self._services.append(service)
            self._keepers.append(asyncio.create_task(service.keep(waits[-1]), name="environment"))
        try:
            await asyncio.gather(*waits)
        except UserError as e:
            raise UserError(f"{self._field}: {e}") from None

    async def close(self) -> None:
        """Stop the processes."""
        tasks = [*self._keepers, *([] if self._start_task is None else [self._start_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)


class LeasedEpisode:
    """A RemoteEpisode for tasks of an event loop. Messages, tools and results are not validated."""

    def __init__(self, remote: RemoteEpisode, in_thread: Any) -> None:
        self._remote, self._in_thread = remote, in_thread

    @property
    def messages(self) -> Any:
        """The first messages for the model."""
        return self._remote.messages

    @property
    def tools(self) -> Any:
        """Schemas of the tools."""
        return self._remote.tools

    @property
    def restarts(self) -> int:
        """Number of replays."""
        return self._remote.restarts

    async def step(self, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> Any:
        """See RemoteEpisode.step. Must not be called again after a cancellation."""
        return await self._in_thread(functools.partial(self._remote.step, text, list(calls)))


def _absolute(connector: str) -> str:
    """Return a connector with an absolute path of its file. A connector that is no file is returned unchanged."""
    file, _, name = connector.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else connector


__all__ = ["EnvironmentFailed", "LeasedEpisode", "ServiceParams", "Services"]
