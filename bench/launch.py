"""Seconds from the command to the first token and the first optimizer step, and from a role's death to the next new
step, through each backend: `python bench/launch.py [--json] [--quick] [--backends local slurm ray]`.

Real SGLang, Megatron-Core, Slurm and Ray, all on this machine, on a tiny run of the quickstart model. `--quick`: the
backend local alone, without deaths. Clusters are started before the clock: what is measured is the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder, where this file would hide the package launch

from rlsys.obs.role import STACKS_VARIABLE  # noqa: E402
from tests.cluster.ray_cluster import RayCluster  # noqa: E402
from tests.cluster.runs import RLSYS, TINY, logs_of, steps_done  # noqa: E402
from tests.cluster.slurm_cluster import SlurmCluster, missing  # noqa: E402

PATIENCE = 600.0
LOOK_SECONDS = 0.05
NODES = 2
VICTIMS = {
    "engine": ("sglang.launch_server",),
    "rollout": ("rlsys.rollout.service",),
    "trainer": ("rlsys.train", "--rollout"),
}
"""Words on the command line of the process that is killed."""


@dataclass
class Timing:
    """Seconds. `restart`: from the death of a role to the end of the first train step that is not a repeated one."""

    first_token: float = 0.0
    first_step: float = 0.0
    restart: dict[str, float] = field(default_factory=dict)


def wait(true: Callable[[], bool], run: Path, process: subprocess.Popen[bytes] | None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        ended = process is not None and process.poll() not in (None, 0)
        if ended or time.monotonic() > deadline:
            raise SystemExit(f"the run ended or hangs:\n{logs_of(run)}")
        time.sleep(LOOK_SECONDS)


def tokens(run: Path) -> int:
    """What the rollout process has received so far; 0 before it answers."""
    log = run / "logs" / "rollout.log"
    found = re.search(r"listening on ([\d.:]+)", log.read_text()) if log.exists() else None
    if found is None:
        return 0
    try:
        with urllib.request.urlopen(f"http://{found[1]}/status", timeout=1) as answer:
            return int(json.loads(answer.read())["received_tokens"])
    except (urllib.error.URLError, OSError):
        return 0


def kill(run: Path, *words: str) -> None:
    """SIGKILL to the innermost process of the run with these words."""
    fitting = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if set(words) <= set(line) and belongs(process, run):
                fitting.append(process)
    fitting[-1].kill()


def belongs(process: psutil.Process, run: Path) -> bool:
    """Every role has its place for stacks, in the run's folder, in its environment."""
    return process.environ().get(STACKS_VARIABLE, "").startswith(str(run))


@contextlib.contextmanager
def started(backend: str, run: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    """The run, through its backend; None where a scheduler holds it. Ended at the end."""
    options = [f"run.dir={run}", *TINY, "trainer.steps=1000"]
    if backend == "slurm":
        with tempfile.TemporaryDirectory(prefix="slurm") as folder, contextlib.ExitStack() as stack:
            cluster = SlurmCluster(Path(folder), NODES)
            stack.callback(cluster.stop)
            stack.callback(cluster.cancel_all)
            command = [*RLSYS, "submit", "configs/quickstart.yaml", *options, f"launch.nodes={NODES}"]
            subprocess.run(command, cwd=ROOT, env=cluster.env, check=True, stdout=subprocess.DEVNULL)
            yield None
        return
    with contextlib.ExitStack() as stack:
        env = dict(os.environ)
        if backend == "ray":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray"))
            env["RAY_ADDRESS"] = stack.enter_context(RayCluster(Path(folder), NODES)).address
            options += ["launch.backend=ray", f"launch.nodes={NODES}"]
        command = [*RLSYS, "train", "configs/quickstart.yaml", *options]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def measure(backend: str, deaths: bool) -> Timing:
    timing = Timing()
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        run = Path(folder) / "run"
        with started(backend, run) as process:
            begin = begin_of(run, process)
            wait(lambda: tokens(run) > 0, run, process)
            timing.first_token = round(time.time() - begin, 2)
            wait(lambda: steps_done(run) > 0, run, process)
            timing.first_step = round(time.time() - begin, 2)
            for role, words in VICTIMS.items() if deaths else ():
                before = steps_done(run)
                wait(lambda: steps_done(run) > before, run, process)  # noqa: B023
                reached, died = steps_done(run), time.time()
                kill(run, *words)
                wait(lambda: steps_done(run) > reached + 1, run, process)  # noqa: B023
                timing.restart[role] = round(time.time() - died, 2)
    return timing


def begin_of(run: Path, process: subprocess.Popen[bytes] | None) -> float:
    """When the command was given: the process's start, or that its script was written, just before sbatch."""
    if process is not None:
        return psutil.Process(process.pid).create_time()
    return (run / "logs" / "submit.sbatch").stat().st_mtime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--quick", action="store_true", help="local alone, without deaths")
    parser.add_argument("--backends", nargs="+", default=["local", "slurm", "ray"])
    args = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    for backend in ["local"] if args.quick else args.backends:
        if backend == "slurm" and (reason := missing()):
            results[backend] = {"skipped": reason}
            continue
        results[backend] = asdict(measure(backend, deaths=not args.quick))
        if not args.json:
            print(f"{backend:6} {results[backend]}", flush=True)
    if args.json:
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], "seconds": results}, indent=2))


if __name__ == "__main__":
    main()
