"""Pool of subprocesses for user functions: a call that hangs is killed, and a crash affects no other call.

Threads would allow neither. Requests are bytes and results are JSON, because a result of user code is not trusted
enough to be unpickled. `serve` is the subprocess's main loop.
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

from rlsys.core.errors import RunError, error_text
from rlsys.core.imports import module_command
from rlsys.core.texts import load_json

START_SECONDS = 120.0
INHERITED_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "HF_HOME", "XDG_CACHE_HOME",
    "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
"""Environment variables of processes that run user code: paths, threads, caches, and what HTTP requests need."""
LENGTH = struct.Struct("<I")
"""Prefix of each message: its length."""
MAX_RESULT_BYTES = 64 * 2**20
"""A process with a larger result is killed."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class PoolProcessError(Exception):
    """The function raised, or its process died: exception type and message."""


class ProcessPool:
    """Pool of reusable processes of one kind.

    Starting a process takes seconds, mostly for imports, while most calls take microseconds. So another process
    starts only if none becomes idle within the time that a start takes; the wait is at most twice the optimum.
    """

    def __init__(self, field: str, module: str, config: bytes, variables: Collection[str] = ()) -> None:
        """Create an empty pool.

        Args:
            field: config field of the functions, for error messages.
            module: the module that each process runs.
            config: first message to each process.
            variables: environment variables to pass on besides INHERITED_VARIABLES.
        """
        self._field = field
        self._module = module
        self._config = config
        self._variables = variables
        self._idle: asyncio.LifoQueue[PoolProcess] = asyncio.LifoQueue()
        self._in_use = 0
        self._queue = asyncio.Lock()
        """Held by the caller that waits for the next process; the other callers queue for the lock, in order."""
        self._start_seconds = 0.0
        self.started = 0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[PoolProcess]:
        """Yield an idle process. On exit it returns to the pool, or is killed if it is still busy."""
        async with self._queue:
            worker = await self._wait_idle() or await self._start()
        self._in_use += 1
        try:
            yield worker
        finally:
            self._in_use -= 1
            if worker.busy:
                await worker.kill()
            else:
                self._idle.put_nowait(worker)

    async def _wait_idle(self) -> PoolProcess | None:
        """Return a process that becomes idle within the time that a new one takes to start; None without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_seconds if self._in_use else 0):
                return await self._idle.get()
        return None

    async def _start(self) -> PoolProcess:
        """Start a process and send it the config.

        Raises:
            RunError: it does not answer.
        """
        self.started += 1
        begin = time.monotonic()
        parent_end, child_end = socket.socketpair()
        try:
            with child_end:
                process = await asyncio.create_subprocess_exec(
                    *module_command(self._module),
                    stdin=child_end.fileno(),
                    stdout=child_end.fileno(),
                    env=self._environment(),
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            parent_end.close()
            raise
        worker = PoolProcess(process, *await asyncio.open_connection(sock=parent_end))
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker.call(self._config)
        except (TimeoutError, PoolProcessError) as e:
            reason = f"no answer in {START_SECONDS:g} s" if isinstance(e, TimeoutError) else error_text(e)
            raise RunError(f"{self._field}: its process did not start: {reason}") from None
        finally:
            if worker.busy:
                await worker.kill()
        self._start_seconds = time.monotonic() - begin
        return worker

    def _environment(self) -> dict[str, str]:
        """Return INHERITED_VARIABLES and the requested variables; others may contain tokens and keys."""
        names = {*INHERITED_VARIABLES, *self._variables}
        variables = {name: value for name, value in os.environ.items() if name in names}
        return variables | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    async def close(self) -> None:
        """Kill all idle processes."""
        while not self._idle.empty():
            await self._idle.get_nowait().kill()


class PoolProcess:
    """One process, for one call at a time.

    The socket is not a pipe of asyncio's subprocess: its `wait` would also wait for the pipes' end, and
    programs that the function started may hold them open after the process has ended.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        results: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._results = results
        self._requests = requests
        self.busy = False

    async def call(self, message: bytes) -> Any:
        """Return the function's result for a message.

        Raises:
            PoolProcessError: the function raised, the process died, or the result is invalid.
        """
        self.busy = True  # stays True if this call is cancelled, or the process dies
        try:
            self._requests.write(LENGTH.pack(len(message)) + message)
            await self._requests.drain()
            (length,) = LENGTH.unpack(await self._results.readexactly(LENGTH.size))
            if length > MAX_RESULT_BYTES:
                raise PoolProcessError(
                    f"ValueError: its result has {length:,} bytes; expected at most {MAX_RESULT_BYTES:,}"
                )
            answer = load_json(await self._results.readexactly(length))
        except (ConnectionError, asyncio.IncompleteReadError):
            raise PoolProcessError(f"ProcessEnded: exit code {await self._process.wait()}") from None
        except ValueError as e:
            raise PoolProcessError(f"ValueError: its result is not JSON: {e}") from None
        self.busy = False
        if "error" in answer:
            raise PoolProcessError(answer["error"])
        return answer["value"]

    async def kill(self) -> None:
        """Kill the process and its descendants. The process adopts orphans, so all of them are found."""
        if self._process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            self._process.kill()
        self._requests.transport.abort()
        await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # children that started meanwhile
            os.killpg(self._process.pid, signal.SIGKILL)


def serve(prepare: Callable[[bytes], Callable[[bytes], Any]], locate: Callable[[BaseException], str]) -> None:
    """Run the subprocess's main loop.

    Ends at the end of standard input, and with the parent process, even while a function hangs.

    Args:
        prepare: makes the function for all later messages from the first message.
        locate: describes where in the source an exception was raised.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for functions, standard input is empty
    os.dup2(2, 1)  # printed text goes to the log, not into the results
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    function = prepare(_read(requests) or b"")
    _write(results, {"value": None})
    while message := _read(requests):
        try:
            _write(results, {"value": function(message)})
        except Exception as e:  # noqa: BLE001  (user code: any exception is its result)
            _write(results, {"error": f"{type(e).__name__}: {e}{locate(e)}"})


def _read(stream: BinaryIO) -> bytes | None:
    """Return the next message; None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _write(stream: BinaryIO, result: dict[str, Any]) -> None:
    """Write a result. Numbers of numpy and similar types are converted, and keys to texts.

    Raises:
        TypeError: a value is not a number.
        ValueError: two keys of a dictionary are the same text.
    """
    data = json.dumps(_with_text_keys(result), default=float).encode()
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        items = {str(key): _with_text_keys(item) for key, item in value.items()}
        if len(items) < len(value):
            raise ValueError(
                f"two keys that are the same text, among {', '.join(items)[:200]}; expected keys that differ as texts"
            )
        return items
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):  # float() reads their digits
        raise TypeError(f"a value is of type {type(value).__name__}; expected a number")
    return value
