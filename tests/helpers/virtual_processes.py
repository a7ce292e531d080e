"""Simulated processes and their network, in virtual time. Faults: a stopped or killed process, a partition, a delay.

A process is a set of tasks of one event loop. After SIGSTOP none of its callbacks runs until SIGCONT; then all due
callbacks run in order, and data from peers waits in its sockets. After SIGKILL no callback runs, not even a
`finally`, and the kernel closes its sockets.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, cast

from rlsys.planner.virtual_time import VirtualLoop
from tests.helpers.scripted_engine import LATENCY

_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
_KERNEL = Context()
"""Context of callbacks that belong to no process, such as the delivery of bytes."""


class Process:
    """A simulated process.

    Attributes:
        name: Kind of the process, by which `Wires` partitions and delays connections.
        exit: None while the process lives, then the reason of its end.
    """

    def __init__(self, name: str, exited: Callable[[Process], None] = lambda _: None) -> None:
        self.name = name
        self.paused = False
        self.exit: object = None
        self._exited = exited
        self._deferred: list[asyncio.Handle] = []
        self._unwinding = False
        _loop().processes.append(self)
        self.connections: set[Connection] = set()

    @property
    def dead(self) -> bool:
        return self.exit is not None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(_PROCESS.set, self)
        return _loop().create_task(work, context=context)

    def main(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run the main task. The process exits when it ends, with its exception or 0 as the reason."""
        self.spawn(work).add_done_callback(self._on_main_done, context=_KERNEL)

    def _on_main_done(self, task: asyncio.Task[Any]) -> None:
        if not self.dead:
            self.end("cancelled" if task.cancelled() else task.exception() or 0)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        if not self.dead:
            self._release_deferred()

    def end(self, reason: object) -> None:
        """End the process at once; none of its callbacks runs again."""
        self.exit = reason
        for connection in list(self.connections):
            connection.reset()
        self._exited(self)

    def unwind(self) -> None:
        """Let callbacks run at the end of the simulation, so that the tasks can be cancelled."""
        self._unwinding = True
        self._release_deferred()

    def _release_deferred(self) -> None:
        ready: deque[asyncio.Handle] = _loop()._ready  # type: ignore[attr-defined]
        ready.extend(self._deferred)
        self._deferred.clear()

    def run(self, gate: _Gate, args: tuple[Any, ...]) -> None:
        if (self.dead or self.paused) and not self._unwinding:
            assert gate.handle is not None
            self._deferred.append(gate.handle)
        else:
            gate.callback(*args)


class _Gate:
    """Callback that runs only while its process does."""

    __slots__ = ("callback", "handle", "process")

    def __init__(self, process: Process, callback: Callable[..., Any]) -> None:
        self.process = process
        self.callback = callback
        self.handle: asyncio.Handle | None = None

    def __call__(self, *args: Any) -> None:
        self.process.run(self, args)


class ProcessLoop(VirtualLoop):
    """Event loop in virtual time that defers the callbacks of stopped processes."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Process] = []

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        gate = _gate(callback, context)
        handle = super().call_soon(callback if gate is None else gate, *args, context=context)
        if gate is not None:
            gate.handle = handle
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        gate = _gate(callback, context)
        handle = super().call_at(when, callback if gate is None else gate, *args, context=context)
        if gate is not None:
            gate.handle = handle
        return handle


def _gate(callback: Callable[..., Any], context: Context | None) -> _Gate | None:
    process = _PROCESS.get() if context is None else context.get(_PROCESS)
    return None if process is None or isinstance(callback, _Gate) else _Gate(process, callback)


def run_processes(body: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a new loop. Exceptions during the final cancellation of all processes are ignored."""

    async def run() -> None:
        try:
            await body
        finally:
            _loop().set_exception_handler(lambda *_: None)
            for process in _loop().processes:
                process.unwind()

    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        runner.run(run())


def _loop() -> ProcessLoop:
    return cast("ProcessLoop", asyncio.get_running_loop())


class Refused(OSError):
    """Connection refused: no process listens at the address."""


class Reset(OSError):
    """Connection reset."""


class Connection:
    """Stream from a server to its client: items arrive in order, each after the network delay."""

    def __init__(self, wires: Wires, client: Process, server: Process) -> None:
        self._wires = wires
        self.client, self.server = client, server
        self._items: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._due = 0.0
        self.closed = False
        self.task: asyncio.Task[Any] | None = None
        """The server's handler."""
        client.connections.add(self)
        server.connections.add(self)

    def send(self, item: Any) -> None:
        """Send an item from the server; None ends the stream. Due times differ: timers of one time have no order."""
        loop = asyncio.get_running_loop()
        self._due = max(self._due + 1e-9, self._wires.due(self.client, self.server))
        loop.call_at(self._due, self._deliver, item, context=_KERNEL)

    def _deliver(self, item: Any) -> None:
        if not self.closed:
            self._items.append(item)
            self._arrived.set()

    async def read(self) -> Any:
        """Return the next item at the client. Raise Reset if the connection is closed and no item is left."""
        while not self._items:
            if self.closed:
                raise Reset("connection reset by peer")
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()

    def reset(self) -> None:
        """Reset the connection at both ends; unread items are lost."""
        if self.closed:
            return
        self._items.clear()
        self.close()
        self._arrived.set()

    def close(self) -> None:
        """Close the connection at the client, which cancels the server's handler."""
        self.closed = True
        self.client.connections.discard(self)
        self.server.connections.discard(self)
        if self.task is not None and not self.server.dead:
            self.task.cancel()


class Wires:
    """Network between kinds of processes ("trainer", "rollout", "engine"). Faults last until a time, both ways."""

    def __init__(self) -> None:
        self._cut: dict[frozenset[str], float] = defaultdict(float)
        self._slow: dict[frozenset[str], tuple[float, float]] = {}
        self._live: list[Connection] = []

    def cut(self, one: str, other: str, until: float) -> None:
        """Partition two kinds of processes: reset their connections and refuse new ones before `until`."""
        self._cut[frozenset((one, other))] = until
        for c in self._live:
            if {c.client.name, c.server.name} == {one, other}:
                c.reset()

    def slow(self, one: str, other: str, seconds: float, until: float) -> None:
        """Delay items sent before `until` by this many seconds."""
        self._slow[frozenset((one, other))] = seconds, until

    def due(self, client: Process, server: Process) -> float:
        current_time = asyncio.get_running_loop().time()
        seconds, until = self._slow.get(frozenset((client.name, server.name)), (0.0, 0.0))
        return current_time + LATENCY + (seconds if current_time < until else 0.0)

    async def connect(self, client: Process, server: Process | None) -> Connection:
        """Connect a client to a server. A stopped server accepts the connection, as its kernel does.

        Raises:
            Refused: There is no live server, or the two are partitioned.
        """
        current_time = asyncio.get_running_loop().time()
        await asyncio.sleep(LATENCY if server is None else self.due(client, server) - current_time)
        current_time = asyncio.get_running_loop().time()
        if server is None or server.dead or current_time < self._cut[frozenset((client.name, server.name))]:
            raise Refused(111, "connection refused")
        self._live = [c for c in self._live if not c.closed]
        self._live.append(connection := Connection(self, client, server))
        return connection


def current_process() -> Process:
    process = _PROCESS.get()
    assert process is not None, "the caller runs in no simulated process"
    return process


async def lines(connection: Connection) -> AsyncIterator[Any]:
    """Yield the items of a connection until its end."""
    while (item := await connection.read()) is not None:
        yield item
