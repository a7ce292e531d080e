"""Engines of a Ray cluster for a running run: `python examples/ray_engines.py RUN COUNT [GPUS]`.

Each engine is an actor with GPUS GPUs that runs `rlsys engines join` on its node, which must have access to RUN, the
model and this repository. Ctrl-C or SIGTERM drains all of them. When an engine ends by itself, its resources return
to Ray. RAY_ADDRESS names the cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import ray


class Joiner:
    """One thread waits for the engine's end, the other one can send it away."""

    def __init__(self) -> None:
        self._started = threading.Event()

    def run(self, run: str, folder: str) -> int:
        """Exit code of the command."""
        command = [sys.executable, "-m", "rlsys.cli.main", "engines", "join", run]
        self._process = subprocess.Popen(
            [*command, "--host", ray.util.get_node_ip_address()], cwd=folder, start_new_session=True
        )
        self._started.set()
        return self._process.wait()

    def leave(self) -> None:
        self._started.wait()
        self._process.terminate()


def main(run: str, count: str, gpus: str = "0") -> int:
    """Until all of them have ended; 1 when one had an error."""
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="ERROR")
    actor = ray.remote(Joiner).options(
        num_cpus=1, num_gpus=int(gpus), max_concurrency=2, scheduling_strategy="SPREAD"
    )
    joiners = [actor.remote() for _ in range(int(count))]
    ends = [joiner.run.remote(str(Path(run).resolve()), str(Path.cwd())) for joiner in joiners]

    def leave(*_: object) -> None:
        for joiner in joiners:
            joiner.leave.remote()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    codes = []
    for end in ends:
        with contextlib.suppress(ray.exceptions.RayActorError):  # its node is gone
            codes.append(ray.get(end))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
