"""Ray cluster of several nodes on one machine. It stops its own process groups, because `ray stop` would stop every
Ray cluster on the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

TIMEOUT_S = 800.0
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
"""Authentication is disabled, because a head node requires a key that it finds in the home folder, but joining nodes
do not read it. The niceness replaces Ray's default of 15, which starves workers on a busy machine."""


class RayCluster:
    """Node i has the address 127.0.0.(2 + i), because Ray rewrites 127.0.0.1 to the machine's own."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder = folder
        with socket.socket() as s:
            s.bind(("127.0.0.2", 0))
            self.address = f"127.0.0.2:{s.getsockname()[1]}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(nodes):
                self.add()
        except BaseException:
            self.stop()
            raise

    def add(self) -> None:
        """Add a node."""
        self._begin(len(self._nodes))

    def restart_node(self, index: int) -> None:
        """Start a node with the same address after `kill`."""
        self._begin(index)

    def _begin(self, index: int) -> None:
        ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
        command = [ray, "start", "--block", f"--node-ip-address=127.0.0.{2 + index}", "--num-cpus=4"]
        command += ["--object-store-memory=100000000", f"--temp-dir={self._folder}"]
        if index == 0:
            command += ["--head", f"--port={self.address.split(':')[1]}", "--include-dashboard=false"]
        else:
            command = [c for c in command if "temp-dir" not in c] + [f"--address={self.address}"]
        with (self._folder / f"node{index}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **SETTINGS},
            )  # fmt: skip
        self._nodes[index : index + 1] = [process]
        self._wait_for(f"node{index}.log", "Ray runtime started", process)

    def kill(self, index: int) -> None:
        """Kill a node and all its processes, as in a power failure."""
        node = psutil.Process(self._nodes[index].pid)
        for process in [node, *node.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._nodes[index].wait()

    def _wait_for(self, log: str, message: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while message not in (text := (self._folder / log).read_text()):
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for process in reversed(self._nodes):
            process.terminate()
        for process in self._nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
