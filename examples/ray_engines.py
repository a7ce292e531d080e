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
    """Owns one `rlsys engines join` process. One actor thread waits for its end, another one can terminate it."""

    def __init__(self) -> None:
        self._started = threading.Event()

    def run(self, run: str, folder: str) -> int:
        """Run the command, and return its exit code."""
        command = [sys.executable, "-m", "rlsys.cli.main", "engines", "join", run]
        self._process = subprocess.Popen(
            [*command, "--host", ray.util.get_node_ip_address()], cwd=folder, start_new_session=True
        )
        self._started.set()
        return self._process.wait()

    def leave(self) -> None:
        """Terminate the command, which drains its engine."""
        self._started.wait()
        self._process.terminate()


def main(run: str, count: str, gpus: str = "0") -> int:
    """Run `count` engines with `gpus` GPUs each until all of them have ended. Return 1 if one failed, else 0."""
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="ERROR")
    actor = ray.remote(Joiner).options(
        num_cpus=1, num_gpus=int(gpus), max_concurrency=2, scheduling_strategy="SPREAD"
    )
    joiners = [actor.remote() for _ in range(int(count))]
    exit_codes = [joiner.run.remote(str(Path(run).resolve()), str(Path.cwd())) for joiner in joiners]

    def drain_all(*_: object) -> None:
        for joiner in joiners:
            joiner.leave.remote()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, drain_all)
    codes = []
    for exit_code in exit_codes:
        with contextlib.suppress(ray.exceptions.RayActorError):  # the actor's node is gone
            codes.append(ray.get(exit_code))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
