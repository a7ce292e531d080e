"""Seconds from the command to the first token and the first optimizer step, and from a role's death to the end of the
first train step that begins after it, through each backend:

    python bench/start_time.py [--json] [--quick] [--backends local slurm ray]

The bench uses real SGLang, Megatron-Core, Slurm and Ray, all on this machine, with a tiny run of the quickstart
model. `--quick` measures only the local backend, without deaths. Clusters are running before the measurement starts.
If a backend fails, its error takes the place of its figures, the others are measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import ROOT, machine, say

from rlsys.obs.role import STACKS_VARIABLE
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import RLSYS, TINY, logs_of
from tests.helpers.slurm_cluster import SlurmCluster, missing

BACKENDS = ("local", "slurm", "ray")
PATIENCE = 300.0
POLL_SECONDS = 0.1
ALIVE_SECONDS = 2.0
END_SECONDS = 60.0
NODES = 2
VICTIMS = {
    "engine": ("rlsys.engine.server",),
    "rollout": ("rlsys.rollout.service",),
    "trainer": ("rlsys.train", "--config"),
}
"""Words on the command line of the process that is killed, by role."""


class Failed(Exception):
    """A run ended, or made no progress within PATIENCE."""


@dataclass
class Timing:
    """Seconds. `restart` is the time from a role's death to the end of the first train step that began after it."""

    first_token: float | None = None
    first_step: float | None = None
    restart: dict[str, float] = field(default_factory=dict)
    failed: str | None = None


@dataclass
class Run:
    """A started run. `begin` is the time of its command, in seconds since the Unix epoch."""

    folder: Path
    begin: float
    alive: Callable[[], bool]

    def wait(self, true: Callable[[], bool]) -> None:
        deadline, next_check = time.monotonic() + PATIENCE, time.monotonic() + ALIVE_SECONDS
        while not true():
            current_time = time.monotonic()
            if current_time > deadline or (current_time > next_check and not self.alive()):
                why = "does not get on" if current_time > deadline else "has ended"
                raise Failed(f"the run {why}:\n{logs_of(self.folder)}")
            next_check = current_time + ALIVE_SECONDS if current_time > next_check else next_check
            time.sleep(POLL_SECONDS)

    def steps(self) -> list[dict[str, Any]]:
        """Return the `step` lines of metrics.jsonl, repeated ones included, without an incomplete last line."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [entry for line in lines if (entry := json.loads(line))["kind"] == "step"]

    def tokens(self) -> int:
        """Return the tokens that the rollout process has received; 0 before it answers."""
        log = self.folder / "logs" / "rollout.log"
        address = re.search(r"listening on ([\d.:]+)", log.read_text()) if log.exists() else None
        if address is None:
            return 0
        try:
            with urllib.request.urlopen(f"http://{address[1]}/status", timeout=1) as answer:
                return int(json.loads(answer.read())["received_tokens"])
        except (urllib.error.URLError, OSError):
            return 0

    def kill(self, *words: str) -> None:
        """Send SIGKILL to the newest process of the run with these words: its keepers are older."""
        fitting = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if set(words) <= set(process.cmdline()) and self._has(process):
                    fitting.append(process)
        max(fitting, key=lambda process: process.create_time()).kill()

    def _has(self, process: psutil.Process) -> bool:
        """Return whether a process belongs to the run: its environment names a file in the run's folder."""
        return process.environ().get(STACKS_VARIABLE, "").startswith(str(self.folder))

    def first_step_since(self, moment: float) -> float | None:
        """Return the time at which the first new step ended that began after `moment`."""
        reached = max((s["step"] for s in self.steps() if s["time"] < moment), default=0)
        began_after = (s for s in self.steps() if s["time"] - s["time_step"] > moment and s["step"] > reached)
        return next((float(step["time"]) for step in began_after), None)


@contextlib.contextmanager
def started(backend: str, folder: Path) -> Iterator[Run]:
    """Start a run through its backend, on a running cluster, and end it afterwards."""
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
    """Stop a run cleanly. If it does not end, kill its supervisor; the keepers then end all roles."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(backend: str, deaths: bool) -> Timing:
    timing = Timing()
    with tempfile.TemporaryDirectory(prefix="run", ignore_cleanup_errors=True) as folder:
        try:
            with started(backend, Path(folder) / "run") as run:
                follow(run, timing, deaths)
        except Failed as e:
            timing.failed = str(e)
    return timing


def follow(run: Run, timing: Timing, deaths: bool) -> None:
    """Follow a run, and write its times to `timing`."""
    run.wait(lambda: run.tokens() > 0)
    timing.first_token = round(time.time() - run.begin, 2)
    run.wait(lambda: bool(run.steps()))
    timing.first_step = round(time.time() - run.begin, 2)
    for role, words in VICTIMS.items() if deaths else ():
        say(f"{timing}; killing the {role}")
        quiet = time.time()
        run.wait(lambda: run.first_step_since(quiet) is not None)  # noqa: B023
        died = time.time()
        run.kill(*words)
        run.wait(lambda: run.first_step_since(died) is not None)  # noqa: B023
        timing.restart[role] = round((run.first_step_since(died) or 0) - died, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument("--quick", action="store_true", help="only the local backend, without deaths")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the started processes, as Ctrl-C does
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
