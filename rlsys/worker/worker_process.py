"""WorkerProcess: owns the process of a rollout worker, the link to it, and its pending calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlsys.core.errors import RunError
from rlsys.engine_requests import Limits
from rlsys.obs.role import describe_exit
from rlsys.worker.link import Call, CallResult, Link, SampleMessage, ToCoordinator, WorkerStatus, pack, unpack
from rlsys.worker.worker_calls import WorkerGone

START_SECONDS = 120.0
"""Time limit for the start of a process. Most of the time is spent on imports."""
END_SECONDS = 5.0
"""Time limit from the end of a process's link to the end of the process."""
_GAUGE_SUFFIXES = ("in_flight", "waiting", "_serving", "weight_version")
"""Suffixes of the router's counts that are current values and not totals."""


class WorkerProcess:
    """Owns one worker process at a time. After `reap`, `start` may start the next one."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        on_samples: Callable[[list[SampleMessage]], None],
    ) -> None:
        """Create a worker without starting it.

        Args:
            number: index of the worker, from 0.
            command: starts the process; its standard input is a socket.
            on_samples: called with messages about samples.
        """
        self.name = f"rollout worker {number}"
        self._command = command
        self._on_samples = on_samples
        self._process: asyncio.subprocess.Process | None = None
        self._link: Link | None = None
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self.error: str | None = None
        """Message of the error after which the process is not restarted; None: it is."""
        self.writer = ""
        """Writer name of the process's segments."""
        self.status = WorkerStatus()
        self.counts_at_save = (0, 0)
        """Numbers of received and of reported tokens as of the last save of all samples."""
        self.launch_engines: list[str] = []
        """URLs of the engines on the worker's command line."""
        self.grows_trees = False
        """Whether the worker's generator generates all responses of a group together."""
        self.limits: Limits
        """Limits of prompts in the worker's router."""
        self.reported_tokens = 0
        """Number of sampled tokens that the current process has reported."""
        self.deaths = 0
        """Number of deaths since the last token or reward."""
        self.last_message_at = 0.0
        """Time of the last message on the monotonic clock."""

    async def start(self, writer: str, **state: Any) -> None:
        """Start the process.

        Args:
            writer: name for the segments of the process.
            **state: other arguments of Worker.do_begin.

        Raises:
            RunError: the process died, or did not start within START_SECONDS.
        """
        self.writer, self.reported_tokens, self.last_message_at = writer, 0, time.monotonic()
        own_end, worker_end = socket.socketpair()
        with worker_end:
            self._process = await asyncio.create_subprocess_exec(*self._command, stdin=worker_end.fileno())
        self._down.clear()
        link = self._link = Link(ToCoordinator, self._on_messages, self._on_link_lost)
        await link.open(own_end)
        try:
            async with asyncio.timeout(START_SECONDS):
                result = await self._request("begin", {"writer": writer, **state})
                self.launch_engines, self.grows_trees, self.limits = result
        except TimeoutError:
            self.kill()
            await self.reap()
            raise RunError(f"{self.name}: not ready {START_SECONDS:g} s after its start; killed") from None
        except WorkerGone:
            self.kill()
            raise RunError(
                f"{self.name}: died during its start: {describe_exit(await self.reap())}"
            ) from None
        self._up.set()

    @property
    def pid(self) -> int:
        """Id of the current or last process."""
        assert self._process is not None
        return self._process.pid

    async def wait_gone(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process's link. Return whether the link has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._down.wait()
        return self._down.is_set()

    @property
    def serving(self) -> int:
        """Number of serving engines."""
        return int(self.status.counts.get("engines_serving", 0))

    @property
    def pending_calls(self) -> int:
        """Number of pending calls."""
        return len(self._calls)

    def take_status(self) -> WorkerStatus:
        """Return the status of a dead process and reset it, because the next process counts from 0."""
        status, self.counts_at_save = self.status, (0, 0)
        self.status = WorkerStatus(states=status.states)
        return status

    def send(self, message: Any) -> None:
        """Send a message. Without a running process it is dropped; the next process gets the samples again."""
        if self._link is not None and self._up.is_set():
            self._link.send(message)

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of the worker, after its process has started.

        Raises:
            RunError: the process has died and is not restarted.
            WorkerGone: the process died during the call.
            Exception: the exception of the method.
        """
        await self._up.wait()
        if self.error is not None:
            raise RunError(self.error)
        return await self._request(name, arguments)

    def fail_all(self, error: str) -> None:
        """Raise this error in every call, because the process is not restarted."""
        self.error = self.error or error
        self._up.set()

    async def _request(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._link is None:
            raise WorkerGone(f"{self.name} died before a call of {name}")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = name, answer
        self._link.send(Call(number, name, pack(arguments)))
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    def _on_messages(self, messages: list[ToCoordinator]) -> None:
        """Handle messages in order, so that the result of a call takes effect after all earlier messages."""
        self.last_message_at = time.monotonic()
        samples: list[SampleMessage] = []
        for message in messages:
            if not isinstance(message, WorkerStatus | CallResult):
                samples.append(message)
                continue
            self._on_samples(samples)
            samples = []
            if isinstance(message, WorkerStatus):
                self.status = message
            elif message.number in self._calls:
                self._on_result(message)
        self._on_samples(samples)

    def _on_result(self, message: CallResult) -> None:
        """End a call. After a call that saves all samples, record the token counts."""
        name, answer = self._calls[message.number]
        if name in ("interrupt", "save"):
            counts = self.status.counts
            self.counts_at_save = (
                int(counts["received_tokens"] - counts["evaluation_tokens"]),
                self.reported_tokens,
            )
        if answer.done():
            return
        if message.error:
            answer.set_exception(unpack(message.error))
        else:
            answer.set_result(unpack(message.result))

    def _on_link_lost(self) -> None:
        """Set the counts to the reported tokens, because unreported ones are lost, and end all calls."""
        self._link = None
        counts = {k: v for k, v in self.status.counts.items() if not k.endswith(_GAUGE_SUFFIXES)}
        counts["received_tokens"] = counts.get("evaluation_tokens", 0) + self.reported_tokens
        states = dict.fromkeys(self.status.states, "unknown: its rollout worker died")
        self.status = WorkerStatus(counts, self.status.prefills, states, generated=self.status.generated)
        self._up.clear()
        self._down.set()
        self.counts_at_save = self.reported_tokens, self.reported_tokens
        for name, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(WorkerGone(f"{self.name} died during a call of {name}"))

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self) -> int:
        """Wait for the process to end, kill it after END_SECONDS, and return its exit code."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                return await self._process.wait()
        self.kill()  # the process closed its link but did not exit
        return await self._process.wait()

    async def close(self) -> None:
        """Close the link, which ends the process."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            await self.reap()
