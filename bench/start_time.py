"""Measure the time to start a run, and to continue after the death of a role, with each backend.

    python bench/start_time.py [--json] [--quick] [--backends local slurm ray]

    first_token   seconds from the command to the first token
    first_step    seconds from the command to the end of the first train step
    restart       seconds from a role's death to the end of the first new train step that began after it

The bench uses real SGLang, Megatron-Core, Slurm and Ray, all on this machine, with a tiny run of the quickstart's
model. Clusters are running before the measurement starts. `--quick` measures only the local backend, without deaths.
If a backend fails, its figures contain the error, the other backends are measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import ROOT, machine, say

from rlsys.obs.coordinator import CoordinatorUnreachable, query_coordinator
from rlsys.obs.role import STACKS_VARIABLE
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import RLSYS, TINY, logs_of
from tests.helpers.slurm_cluster import SlurmCluster, missing

BACKENDS = ("local", "slurm", "ray")
WAIT_SECONDS = 300.0
"""Time limit of Run.wait."""
POLL_SECONDS = 0.1
ALIVE_SECONDS = 2.0
"""Time between two checks whether the run is alive."""
END_SECONDS = 60.0
"""Time that a run has to end."""
NODES = 2
"""Nodes of the Slurm and the Ray cluster."""
VICTIMS = {
    "engine": ("rlsys.engine.server",),
    "rollout": ("rlsys.rollout.service",),
    "trainer": ("rlsys.train", "--config"),
}
"""Words on the command line of the process that is killed, by role."""


class Failed(Exception):
    """Raised when a run ends, or does not reach a condition within WAIT_SECONDS."""


@dataclass
class Timing:
    """Figures of a backend, in seconds (see the module's docstring); None if not measured.

    Attributes:
        restart: seconds by role.
        failed: the error of a run that failed.
    """

    first_token: float | None = None
    first_step: float | None = None
    restart: dict[str, float] = field(default_factory=dict)
    failed: str | None = None


@dataclass
class Run:
    """A started run.

    Attributes:
        folder: the run folder.
        begin: time of the command, in seconds since the Unix epoch.
        alive: returns whether the run still runs.
    """

    folder: Path
    begin: float
    alive: Callable[[], bool]

    def wait(self, condition: Callable[[], bool], text: str) -> None:
        """Wait until `condition` is true.

        Args:
            condition: called every POLL_SECONDS.
            text: the condition in words, for the error.

        Raises:
            Failed: the run ended, or the condition is false after WAIT_SECONDS.
        """
        deadline, next_check = time.monotonic() + WAIT_SECONDS, time.monotonic() + ALIVE_SECONDS
        while not condition():
            current_time = time.monotonic()
            if current_time > deadline:
                raise Failed(
                    f"{self.folder}: expected {text} within {WAIT_SECONDS:.0f} s\n{logs_of(self.folder)}"
                )
            if current_time > next_check:
                if not self.alive():
                    raise Failed(
                        f"{self.folder}: the run ended; expected {text} first\n{logs_of(self.folder)}"
                    )
                next_check = current_time + ALIVE_SECONDS
            time.sleep(POLL_SECONDS)

    def steps(self) -> list[dict[str, Any]]:
        """Return the complete `step` lines of metrics.jsonl, including those of repeated steps."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [entry for line in lines if (entry := json.loads(line))["kind"] == "step"]

    def tokens(self) -> int:
        """Return the number of tokens that the rollout process has received; 0 before it answers."""
        try:
            status = query_coordinator(self.folder, "status", timeout_s=1)
        except CoordinatorUnreachable:  # not ready
            return 0
        return int(json.loads(status)["received_tokens"]) if status else 0

    def kill(self, *words: str) -> None:
        """Send SIGKILL to the newest process of the run with these words on its command line.

        The keepers of the process, which are older, have the same words.
        """
        matching = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if set(words) <= set(process.cmdline()) and self._has(process):
                    matching.append(process)
        max(matching, key=lambda process: process.create_time()).kill()

    def _has(self, process: psutil.Process) -> bool:
        """Return whether a process belongs to the run, by the folder of stacks in its environment."""
        return process.environ().get(STACKS_VARIABLE, "").startswith(str(self.folder))

    def first_step_since(self, moment: float) -> float | None:
        """Return the end of the first new step that began after `moment`; None if there is none.

        Args:
            moment: in seconds since the Unix epoch, like the result. Steps that ended earlier are not new, even if
                they are repeated.
        """
        last_step = max((s["step"] for s in self.steps() if s["time"] < moment), default=0)
        new_steps = (s for s in self.steps() if s["time"] - s["time_step"] > moment and s["step"] > last_step)
        return next((float(step["time"]) for step in new_steps), None)


@contextlib.contextmanager
def started(backend: str, folder: Path) -> Iterator[Run]:
    """Start a run with a backend, on a running cluster, and yield it. End run and cluster after the context.

    Args:
        backend: one of BACKENDS.
        folder: the run folder.
    """
    options = ["configs/quickstart.yaml", f"run.dir={folder}", *TINY, "trainer.steps=1000"]
    with contextlib.ExitStack() as stack:
        if backend == "slurm":
            yield submitted(stack, folder, options)
            return
        env = dict(os.environ)
        if backend == "ray":
            ray = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True))
            env["RAY_ADDRESS"] = stack.enter_context(RayCluster(Path(ray), NODES)).address
            options += ["launch.backend=ray", f"launch.nodes={NODES}"]
        begin = time.time()
        process = subprocess.Popen(
            [*RLSYS, "train", *options], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True
        )
        stack.callback(end, process)
        yield Run(folder, begin, lambda: process.poll() is None)


def submitted(stack: contextlib.ExitStack, folder: Path, options: list[str]) -> Run:
    """Start a Slurm cluster, and submit a run to it.

    Args:
        stack: ends the jobs and the cluster.
        folder: the run folder.
        options: config and overrides.

    Raises:
        Failed: `rlsys submit` failed.
    """
    spool = stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True))
    cluster = SlurmCluster(Path(spool), NODES)
    stack.callback(cluster.stop)
    stack.callback(cluster.cancel_all)
    begin = time.time()
    command = [*RLSYS, "submit", *options, f"launch.nodes={NODES}"]
    process = subprocess.run(command, cwd=ROOT, env=cluster.env, capture_output=True, text=True)
    if process.returncode:
        raise Failed(process.stderr)
    job = process.stdout.strip()
    return Run(folder, begin, lambda: cluster.job_state(job) in ("PENDING", "CONFIGURING", "RUNNING"))


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a run cleanly. After END_SECONDS kill its supervisor; the keepers then end all roles."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(backend: str, deaths: bool) -> Timing:
    """Make a run with a backend, and return its times.

    Args:
        backend: one of BACKENDS.
        deaths: whether to kill each of VICTIMS.
    """
    timing = Timing()
    with tempfile.TemporaryDirectory(prefix="run", ignore_cleanup_errors=True) as folder:
        try:
            with started(backend, Path(folder) / "run") as run:
                follow(run, timing, deaths)
        except Failed as e:
            timing.failed = str(e)
    return timing


def follow(run: Run, timing: Timing, deaths: bool) -> None:
    """Wait for the first token and the first step of a run, then kill the roles one after the other.

    Args:
        run: the run.
        timing: gets each time as soon as it is measured.
        deaths: whether to kill each of VICTIMS.
    """
    run.wait(lambda: run.tokens() > 0, "the first token")
    timing.first_token = round(time.time() - run.begin, 2)
    run.wait(lambda: bool(run.steps()), "the first train step")
    timing.first_step = round(time.time() - run.begin, 2)
    for role, arguments in VICTIMS.items() if deaths else ():
        say(f"{timing}; killing the {role}")
        quiet = time.time()
        run.wait(lambda: run.first_step_since(quiet) is not None, "a new train step")  # noqa: B023
        died = time.time()
        run.kill(*arguments)
        run.wait(lambda: run.first_step_since(died) is not None, f"a step after the kill of {role}")  # noqa: B023
        timing.restart[role] = round((run.first_step_since(died) or 0) - died, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument("--quick", action="store_true", help="only the local backend, without deaths")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="backends (default: all)"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the started processes, like Ctrl-C
    results: dict[str, dict[str, Any]] = {}
    result = {"machine": machine(), "seconds": results}
    for backend in ["local"] if args.quick else args.backends:
        if backend == "slurm" and (reason := missing()):
            results[backend] = {"skipped": reason}
            continue
        timing = measure(backend, deaths=not args.quick)
        results[backend] = {k: v for k, v in asdict(timing).items() if v is not None}
        say(f"{backend}: {results[backend]}")
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(f"{backend:6} {outcome}" for backend, outcome in results.items()))
    sys.exit(any("failed" in outcome for outcome in results.values()))


if __name__ == "__main__":
    main()
