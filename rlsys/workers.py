"""Functions of somebody else in processes of their own: one that hangs is killed, one that crashes takes nobody
along.

A thread could do neither. Questions are bytes, answers are JSON, because what such a function makes is not to be
trusted with more than numbers and words. `serve` is the process's end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

import psutil

from rlsys.errors import RunError
from rlsys.texts import load_json

START_SECONDS = 120.0
KEPT_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "HF_HOME", "XDG_CACHE_HOME",
)  # fmt: skip
LENGTH = struct.Struct("<I")
"""Every message is its length and its bytes."""
LARGEST_ANSWER = 64 * 2**20
"""Bytes; a process with a larger one is killed."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class WorkerError(Exception):
    """The function raised, or its process died: a type and a message."""


class Workers:
    """Processes of one kind, used again and again.

    A start costs seconds, mostly imports, and most answers cost microseconds. So another worker starts only when none
    has come free in the time that a start takes: that is never more than twice the shortest wait.
    """

    def __init__(self, field: str, module: str, config: bytes, variables: Collection[str] = ()) -> None:
        """`field` of the config names what runs there. `module` is the process, `config` its first message, and
        `variables` those of the environment that it sees beside KEPT_VARIABLES."""
        self._field = field
        self._module = module
        self._config = config
        self._variables = variables
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._held = 0
        self._next = asyncio.Lock()
        """Held by the one that waits or starts for the next worker; the others are behind it, in their order."""
        self._start_seconds = 0.0
        self.started = 0

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A worker that is ready. It is killed when it has not answered by the end."""
        async with self._next:
            worker = await self._free() or await self._start()
        self._held += 1
        try:
            yield worker
        finally:
            self._held -= 1
            if worker.busy:
                await worker.kill()
            else:
                self._idle.put_nowait(worker)

    async def _free(self) -> Worker | None:
        """One that is idle, or comes free sooner than a new one would start."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_seconds if self._held else 0):
                return await self._idle.get()
        return None

    async def _start(self) -> Worker:
        self.started += 1
        begin = time.monotonic()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", self._module,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env=self._environment(),
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        worker = Worker(process, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker.ask(self._config)
        except (TimeoutError, WorkerError) as e:
            raise RunError(f"{self._field}: its process did not start: {e or 'no answer'}") from None
        finally:
            if worker.busy:
                await worker.kill()
        self._start_seconds = time.monotonic() - begin
        return worker

    def _environment(self) -> dict[str, str]:
        """Of this process's variables only what programs need and what was named: the code is somebody else's, and
        ours hold tokens and keys."""
        named = {*KEPT_VARIABLES, *self._variables}
        kept = {name: value for name, value in os.environ.items() if name in named}
        return kept | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    async def close(self) -> None:
        while not self._idle.empty():
            await self._idle.get_nowait().kill()


class Worker:
    """One process; one question at a time.

    The socket is not one of asyncio's pipes of a process: its `wait` would wait for their end too, and whatever the
    function started may hold them open after the process has gone.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        answers: asyncio.StreamReader,
        questions: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._answers = answers
        self._questions = questions
        self.busy = False

    async def ask(self, message: bytes) -> Any:
        """What the function gives. Raises WorkerError."""
        self.busy = True  # and stays it when this is cancelled, or the process dies
        try:
            self._questions.write(LENGTH.pack(len(message)) + message)
            await self._questions.drain()
            (length,) = LENGTH.unpack(await self._answers.readexactly(LENGTH.size))
            if length > LARGEST_ANSWER:
                raise WorkerError(
                    f"ValueError: its answer has {length:,} bytes; at most {LARGEST_ANSWER:,} are read"
                )
            answer = load_json(await self._answers.readexactly(length))
        except (ConnectionError, asyncio.IncompleteReadError):
            raise WorkerError(f"ProcessEnded: with code {await self._process.wait()}") from None
        except ValueError as e:
            raise WorkerError(f"ValueError: its answer is no JSON: {e}") from None
        self.busy = False
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    async def kill(self) -> None:
        """It and whatever the function started. The worker adopts orphans, so that all are its descendants."""
        if self._process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            self._process.kill()
        self._questions.transport.abort()
        await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a child that was born meanwhile
            os.killpg(self._process.pid, signal.SIGKILL)


def serve(prepare: Callable[[bytes], Callable[[bytes], Any]], place: Callable[[BaseException], str]) -> None:
    """The process's main function. `prepare` makes of the first message what answers all others; `place` says where
    in the source an error came from.

    Ends with its standard input, and with the process that started it even while a function hangs.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads gets nothing
    os.dup2(2, 1)  # what it prints goes to the log, not among the answers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = prepare(_read(questions) or b"")
    _write(answers, {"value": None})
    while message := _read(questions):
        try:
            _write(answers, {"value": answer(message)})
        except Exception as e:  # noqa: BLE001  (user code: whatever it raises is its verdict)
            _write(answers, {"error": f"{type(e).__name__}: {e}{place(e)}"})


def _read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _write(stream: BinaryIO, answer: dict[str, Any]) -> None:
    """Numbers of numpy and the like are answers too. Raises TypeError for what is no number."""
    data = json.dumps(answer, default=float).encode()
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()
