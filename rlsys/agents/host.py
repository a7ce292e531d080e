"""Host: the process from which agents are forked. hosting.py starts it and is its client.

The host needs only the standard library, because it may run in the Python of the agent's own venv
(rlsys/venv_runner/run.py). It imports the user's file once. Each agent is a fork, which starts in milliseconds
instead of the seconds that the imports take, and shares the imported memory. Each agent leads its own process group,
so that its children can be killed with it. When the standard input of the host ends, the host and all agents end.

    <- {"run": "file.py:function"} | {"command": [...]}        -> {"ready": true} | {"error": text}
       "episodes": true: the function plays episodes of several policies (multi_policy.py)
    <- {"start": id, "task": {...}, "seed": n, "env": {...}}   -> {"ended": id, "error": text | null, "signal": n}
    <- {"kill": id}
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import http.client
import inspect
import json
import numbers
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from rlsys.core.errors import UserError
from rlsys.core.imports import resolve, source_location

FIELD, EPISODE = "rollout.generator_params.run", "episode"
"""Names of the function in errors: the config field of an agent, the argument of `rlsys meet` for episodes."""
REWARD_URL, REWARD_KEY = "RLSYS_REWARD_URL", "OPENAI_API_KEY"
"""Environment variables with the URL and the key to which an agent reports its reward."""
SAMPLE = "RLSYS_SAMPLE_ID"
"""Environment variable of the agent of a training sample: the id of the sample."""
EVALUATION_STEP = "RLSYS_EVALUATION_STEP"
"""Environment variable of the agent of an evaluation in a run: the number of train steps in the weights."""
LENGTH = struct.Struct("<I")
"""Format of the length before each message."""
MAX_ERROR_CHARACTERS = 4000
"""Largest length of an agent's error in bytes. A pipe can buffer this many, so that the write does not block."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Child:
    id: int
    errors: int
    """File descriptor from which the child's error is read."""


class Host:
    """Forks, kills and reaps agents, in one loop that waits for the socket and for SIGCHLD. Owns the agents."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, _Child] = {}  # by process id
        self._awake, wakeup = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup)

    def run(self) -> None:
        """Handle requests until the channel ends."""
        first_message = self._read()
        if first_message is None:
            return
        try:
            launch = _load_program(first_message)
        except UserError as e:
            self._write({"error": str(e)})
            return
        self._write({"ready": True})
        with selectors.DefaultSelector() as ready:
            ready.register(self._channel, selectors.EVENT_READ)
            ready.register(self._awake, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj == self._awake:
                        os.read(self._awake, 4096)
                        self._reap()
                    elif (request := self._read()) is None:
                        return
                    elif "kill" in request:
                        self._kill(request["kill"])
                    else:
                        self._start(request, launch)

    def close(self) -> None:
        """Kill all agents, and all processes that ended agents have started."""
        for child in list(self._children.values()):
            self._kill(child.id)
        _kill_descendants(os.getpid())

    def _start(self, request: dict[str, Any], launch: Callable[[dict[str, Any]], None]) -> None:
        parent_end, child_end = os.pipe()
        pid = os.fork()
        if not pid:
            self._run_agent(request, launch, child_end)
        os.close(child_end)
        os.set_blocking(parent_end, False)
        self._children[pid] = _Child(request["start"], parent_end)

    def _run_agent(
        self, request: dict[str, Any], launch: Callable[[dict[str, Any]], None], errors: int
    ) -> NoReturn:
        """Run an agent in the forked process, and exit. `errors`: file descriptor to which its error is written."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _die_with_parent()
            self._channel.close()
            for child in self._children.values():
                os.close(child.errors)
            os.environ.update(request["env"])
            random.seed(request["seed"])  # otherwise all agents would draw the same numbers
            launch(request["task"])
            code = 0
        except BaseException as e:  # noqa: BLE001  (user code: any exception ends this process, and is reported)
            traceback.print_exc()
            error = f"{type(e).__name__}: {' '.join(str(e).split())}"
            message = error[: MAX_ERROR_CHARACTERS // 4] + source_location(e)
            os.write(errors, message.encode(errors="replace")[:MAX_ERROR_CHARACTERS])
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Reap all ended children, and report those that are agents. The others are orphans of agents."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            message = ""
            with contextlib.suppress(
                BlockingIOError
            ):  # no error, but processes of the agent keep the pipe open
                message = os.read(child.errors, MAX_ERROR_CHARACTERS).decode(errors="replace")
            os.close(child.errors)
            _kill_group(pid)  # processes that the agent has started
            code = os.waitstatus_to_exitcode(status)
            error = message or (f"ended with code {code}" if code > 0 else None)
            self._write({"ended": child.id, "error": error, "signal": max(0, -code)})

    def _kill(self, agent: int) -> None:
        for pid, child in self._children.items():
            if child.id == agent:
                _kill_descendants(pid)
                _kill_group(pid)

    def _read(self) -> dict[str, Any] | None:
        """Read the next message; None at the end of the stream."""
        length = _read_exactly(self._channel, LENGTH.size)
        body = None if length is None else _read_exactly(self._channel, LENGTH.unpack(length)[0])
        return None if body is None else json.loads(body)

    def _write(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with contextlib.suppress(BrokenPipeError):  # the client has ended: the next read ends this process
            self._channel.sendall(LENGTH.pack(len(data)) + data)


def _load_program(first_message: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Import the agents' function. Return a function that runs the agent of a task in the calling process.

    Args:
        first_message: first message of the client, with `run` or `command`.

    Raises:
        UserError: the user's function does not exist.
    """
    if command := first_message.get("command"):

        def execute(task: dict[str, Any]) -> None:
            """Replace this process by the command, with the task as JSON on its standard input."""
            with tempfile.TemporaryFile() as task_file:
                task_file.write(json.dumps(task, default=str).encode())
                task_file.seek(0)
                os.dup2(task_file.fileno(), 0)
            os.execvpe(command[0], command, os.environ)

        return execute
    plays_episodes = "episodes" in first_message
    function = resolve(EPISODE if plays_episodes else FIELD, first_message["run"], {})

    def call(task: dict[str, Any]) -> None:
        arguments = (task["row"], task["policies"]) if plays_episodes else (task,)
        result = function(*arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        if plays_episodes:
            _report({"rewards": result})
        elif isinstance(result, numbers.Real):  # other results are ignored
            _report({"reward": float(result)})

    return call


def _report(result: dict[str, Any]) -> None:
    """Report a reward, or the rewards of an episode, to the endpoint.

    Raises:
        ValueError: the endpoint refuses the value.
    """
    url = urlsplit(os.environ[REWARD_URL])
    connection = http.client.HTTPConnection(url.hostname or "", url.port)
    headers = {"Authorization": f"Bearer {os.environ[REWARD_KEY]}"}
    connection.request("POST", url.path, json.dumps(result, default=float), headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != 200:
        raise ValueError(json.loads(body)["error"]["message"])


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    """Read `size` bytes; None at the end of the stream."""
    data = bytearray()
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_descendants(pid: int) -> None:
    """Kill all descendants of a process."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    descendants = list(children.get(pid, ()))
    for child in descendants:  # the list grows in the loop
        descendants += children.get(child, ())
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the id and the parent's id of each process of the machine."""
    if sys.platform != "linux":
        processes = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        )
        for line in processes.stdout.splitlines():
            pid, parent = line.split()
            yield int(pid), int(parent)
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended
                after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
                yield int(folder.name), int(after_name.split()[1])


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the standard input of agents is empty
    os.dup2(2, 1)  # the output of agents goes to the log
    _die_with_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    host = Host(channel)
    try:
        host.run()
    finally:
        host.close()
