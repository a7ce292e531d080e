"""The coordinator's end of one rollout worker: its process, its link, the calls that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlsys.core.errors import RunError
from rlsys.engine_requests import Limits
from rlsys.obs.role import describe_exit
from rlsys.router.pool import PinLost
from rlsys.worker.link import Answer, Call, Figures, Link, OfSamples, ToCoordinator, pack, unpack

START_SECONDS = 120.0
"""A start is mostly imports."""
END_SECONDS = 5.0
"""From the end of its link to its own."""
_PRESENT = ("in_flight", "waiting", "_serving", "weight_version")
"""Ends of the names of a router's counts that say how things are and not what has happened."""


class WorkerGone(PinLost):
    """A rollout worker died in the middle of a call."""


class WorkerProcess:
    """Owns one worker at a time: after `reap` it may be started again."""

    def __init__(
        self, number: int, command: Sequence[str], hear: Callable[[WorkerProcess, list[OfSamples]], None]
    ) -> None:
        """`command`: gets a socket as its standard input. `hear`: takes what it says of samples."""
        self.name = f"rollout worker {number}"
        self._command = command
        self._hear_samples = hear
        self._process: asyncio.subprocess.Process | None = None
        self._link: Link | None = None
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._error: str | None = None
        self.writer = ""
        """Of its segments."""
        self.figures = Figures()
        self.settled = (0, 0)
        """Tokens that it had received for samples when it saved all that runs, and those that it had told by then."""
        self.of_launch: list[str] = []
        """URLs of the engines that it has from its beginning."""
        self.grows_trees = False
        """Its generator makes all responses of a group together."""
        self.limits: Limits
        """Of prompts, in its router."""
        self.told = 0
        """Tokens of samples that this process has told."""
        self.deaths = 0
        """Of it in a row, without a token or a reward in between."""
        self.groups: Counter[int] = Counter()
        """Group id -> how many of its samples run here."""
        self.heard_at = 0.0
        """When it spoke last, on the monotonic clock."""

    async def start(self, writer: str, **state: Any) -> None:
        """`state`: what Worker.do_begin gets beside the writer. Raises RunError when it does not come up."""
        self.writer, self.told, self.heard_at = writer, 0, time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(*self._command, stdin=theirs.fileno())
        self._down.clear()
        link = self._link = Link(ToCoordinator, self._hear, self._lost)
        await link.open(ours)
        try:
            async with asyncio.timeout(START_SECONDS):
                began = await self._ask("begin", {"writer": writer, **state})
                self.of_launch, self.grows_trees, self.limits = began
        except (TimeoutError, WorkerGone):
            self.kill()
            raise RunError(f"{self.name} did not start: {describe_exit(await self.reap())}") from None
        self._up.set()

    @property
    def pid(self) -> int:
        """Of the process that it has, or had last."""
        assert self._process is not None
        return self._process.pid

    async def gone(self, seconds: float) -> bool:
        """Whether it is, at the latest after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._down.wait()
        return self._down.is_set()

    @property
    def serving(self) -> int:
        """Its engines that serve."""
        return int(self.figures.counts.get("engines_serving", 0))

    @property
    def asked(self) -> int:
        """Calls that wait for it."""
        return len(self._calls)

    def take_figures(self) -> Figures:
        """What a process that is gone has counted; the next one begins anew."""
        figures = self.figures
        self.figures = Figures(states=figures.states)
        return figures

    def send(self, message: Any) -> None:
        """Nothing while there is no process, or one that starts: what runs is sent once it is there."""
        if self._link is not None and self._up.is_set():
            self._link.send(message)

    async def call(self, name: str, **arguments: Any) -> Any:
        """Waits for a process to be there. Raises what the call raised, WorkerGone, and what `give_up` said."""
        await self._up.wait()
        if self._error is not None:
            raise RunError(self._error)
        return await self._ask(name, arguments)

    def give_up(self, error: str) -> None:
        """There will be no further process: every call raises this."""
        self._error = error
        self._up.set()

    async def _ask(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._link is None:
            raise WorkerGone(f"{self.name} is gone")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = name, answer
        self._link.send(Call(number, name, pack(arguments)))
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    def _hear(self, messages: list[ToCoordinator]) -> None:
        """In their order: an answer is about what was told before it."""
        self.heard_at = time.monotonic()
        samples: list[OfSamples] = []
        for message in messages:
            if not isinstance(message, Figures | Answer):
                samples.append(message)
                continue
            self._hear_samples(self, samples)
            samples = []
            if isinstance(message, Figures):
                self.figures = message
            elif message.number in self._calls:
                self._hear_answer(message)
        self._hear_samples(self, samples)

    def _hear_answer(self, message: Answer) -> None:
        name, answer = self._calls[message.number]
        if name in ("interrupt", "save"):
            counts = self.figures.counts
            self.settled = int(counts["received_tokens"] - counts["evaluation_tokens"]), self.told
        if answer.done():
            return
        if message.error:
            answer.set_exception(unpack(message.error))
        else:
            answer.set_result(unpack(message.result))

    def _lost(self) -> None:
        """All that it told has been heard. Tokens that it had received and not told were never there."""
        self._link = None
        counts = {k: v for k, v in self.figures.counts.items() if not k.endswith(_PRESENT)}
        counts["received_tokens"] = counts.get("evaluation_tokens", 0) + self.told
        states = dict.fromkeys(self.figures.states, "its rollout worker is gone")
        self.figures = Figures(counts, self.figures.prefills, states, generated=self.figures.generated)
        self._up.clear()
        self._down.set()
        self.settled = self.told, self.told
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(WorkerGone(f"{self.name} is gone"))

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self) -> int:
        """Nothing of it runs any more when this returns. Its exit code."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                return await self._process.wait()
        self.kill()  # it has closed its link, and lives
        return await self._process.wait()

    async def close(self) -> None:
        """It ends when its link does."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            await self.reap()
