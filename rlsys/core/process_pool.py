"""Pool of subprocesses for user functions.

Unlike a thread, a subprocess can be killed if a call hangs, and a crash affects no other call. Requests are bytes and
results are JSON; results are not pickled, because unpickling could run code. `serve` is the subprocess's main loop.
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
"""Environment variables that processes with user code inherit: paths, threads, caches, settings of HTTP clients."""
LENGTH = struct.Struct("<I")
"""Format of the length in bytes before each message."""
MAX_RESULT_BYTES = 64 * 2**20
"""Maximum size of a result; a process with a larger one is killed."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class PoolProcessError(Exception):
    """The function raised an exception, or its process died. The message has the exception's type and text."""


class ProcessPool:
    """Pool of reusable processes that run the same module.

    A start takes seconds, mostly for imports, while most calls take microseconds. Therefore another process starts
    only if no process becomes idle within the duration of a start. The wait is at most twice the optimum.
    """

    def __init__(self, field: str, module: str, config: bytes, variables: Collection[str] = ()) -> None:
        """Create an empty pool.

        Args:
            field: config field that names the function, for messages.
            module: module that each process runs; it calls `serve`.
            config: first message to each process.
            variables: names of environment variables that processes inherit in addition to INHERITED_VARIABLES.
        """
        self._field = field
        self._module = module
        self._config = config
        self._variables = variables
        self._idle: asyncio.LifoQueue[PoolProcess] = asyncio.LifoQueue()
        self._in_use = 0
        self._queue = asyncio.Lock()
        """Lock of the caller that waits for the next process; other callers wait for the lock, in order."""
        self._start_seconds = 0.0
        self.started = 0
        """Number of processes that were started."""

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[PoolProcess]:
        """Provide a process for the context. At the end it returns to the pool, or is killed if it is still busy.

        Raises:
            RunError: a new process did not start.
        """
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
        """Return a process that is idle, or becomes idle within the duration of a start; None if there is none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_seconds if self._in_use else 0):
                return await self._idle.get()
        return None

    async def _start(self) -> PoolProcess:
        """Start a process, and wait until it has processed the config.

        Raises:
            RunError: the process does not respond within START_SECONDS, or `prepare` fails in it.
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
        """Return the environment of a process."""
        names = {*INHERITED_VARIABLES, *self._variables}  # others may contain tokens and keys
        variables = {name: value for name, value in os.environ.items() if name in names}
        return variables | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    async def close(self) -> None:
        """Kill all idle processes."""
        while not self._idle.empty():
            await self._idle.get_nowait().kill()


class PoolProcess:
    """A process of a pool, which runs one call at a time.

    Attributes:
        busy: whether a call runs, was cancelled, or failed because the process died; it must then be killed.
    """

    # Messages go through a socket, not through pipes of asyncio's subprocess: `Process.wait` would also wait for the
    # end of the pipes, which programs that the function started may keep open.

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
        """Call the function with a message, and return its result.

        Raises:
            PoolProcessError: the function raised an exception, the process died, or the result is invalid.
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
        """Kill the process and all of its descendants."""
        if self._process.returncode is None:  # it adopts orphans, so `children` includes them
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
    """Run the subprocess's main loop: read a message from standard input, call the function, write its result.

    The loop ends with standard input. If the parent process ends, the kernel kills this process.

    Args:
        prepare: returns the function for the later messages; its argument is the first message.
        locate: returns the source location of an exception, for messages.
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
    """Return the next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _write(stream: BinaryIO, result: dict[str, Any]) -> None:
    """Write a result as JSON. Values of other types than JSON's become floats, and keys become texts.

    Raises:
        TypeError: a value cannot be converted to a float.
        ValueError: two keys of a dict have the same text.
    """
    data = json.dumps(_with_text_keys(result), default=float).encode()
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        items = {str(key): _with_text_keys(item) for key, item in value.items()}
        if len(items) < len(value):
            raise ValueError(
                f"two keys have the same text, among {', '.join(items)[:200]}; expected keys that differ as texts"
            )
        return items
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):  # float() would parse them as text
        raise TypeError(f"a value is of type {type(value).__name__}; expected a number")
    return value
