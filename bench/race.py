"""Compare the time of rlsys and of TRL's GRPOTrainer to the same held-out accuracy, with and without the start.

    make setup-test && python bench/race.py --json [--seeds 5] [--tasks quickstart tail] [--quick]

Both frameworks train the same model on the same prompts with the same reward, batch, learning rate, temperature and
longest response, one after the other on the same machine, in alternating order. Each evaluates greedily after every
step and ends at the target. The figures exclude the time of evaluations. Each framework uses its own loss and its own
generation: TRL generates with transformers on all cores; rlsys runs APRIL with an engine next to the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import ROOT, machine, say, spread

from launch.bootstrap import PARITY_FOLDER, PARITY_STAMP
from launch.environment import CPU_HOST

POLL_SECONDS = 0.2
END_SECONDS = 60.0
"""Time that a framework has to end after SIGTERM, and after SIGKILL."""
CONFIG = "configs/quickstart.yaml"


@dataclass(frozen=True)
class Task:
    """A task that both frameworks train.

    Attributes:
        target: held-out accuracy at which a run ends.
        overrides: fields of CONFIG to set.
        time_limit: seconds that a run may take.
    """

    target: float
    overrides: tuple[str, ...]
    time_limit: float


TASKS = {
    "quickstart": Task(0.9, ("trainer.steps=40",), 1200),
    # Four times the batch, with many long responses, and a learning rate with which the task takes many steps.
    "tail": Task(
        0.95,
        (
            "trainer.steps=200", "trainer.lr=2.0e-5", "rollout.groups_per_step=64", "rollout.max_response_tokens=384",
            "data.params={short: [3, 8], long: [14, 20], long_share: 0.3}",
        ),
        5400,
    ),
}  # fmt: skip
QUICK = Task(0.0, ("trainer.steps=1", "rollout.groups_per_step=2", "eval.prompts=8"), 600)


class Failed(Exception):
    """Raised when a framework ends before it reaches the target, or does not reach it in time."""


@dataclass(frozen=True)
class Run:
    """Figures of one run until it reached the target.

    Attributes:
        steps: number of train steps.
        accuracy: held-out accuracy after the last step.
        step_seconds: seconds from the moment at which training could begin to the end of the last step, without
            evaluations.
        start_seconds: seconds from the process's start to the moment at which training could begin.
        wall_seconds: seconds from the process's start to the evaluation that reached the target, with evaluations.
    """

    steps: int
    accuracy: float
    step_seconds: float
    start_seconds: float
    wall_seconds: float


def read_run(lines: Sequence[dict[str, Any]], start_time: float, target: float) -> Run | None:
    """Return the figures of a run, or None if it has not reached the target.

    An evaluation lasts from the previous line to its own line. Evaluations before the first step are a part of the
    start.

    Args:
        lines: lines of the kinds `run` or `start`, `step` and `eval`, with `time` in seconds of time.time().
        start_time: start of the process.
        target: held-out accuracy.
    """
    ready, evaluation_seconds = 0.0, 0.0
    previous_time = start_time
    for line in lines:
        if line["kind"] == "run" or line["kind"] == "start" or (line["kind"] == "eval" and line["step"] == 0):
            ready = line["time"]
        elif line["kind"] == "eval":
            if line["accuracy"] >= target:
                return Run(
                    steps=line["step"],
                    accuracy=line["accuracy"],
                    step_seconds=previous_time - ready - evaluation_seconds,
                    start_seconds=ready - start_time,
                    wall_seconds=line["time"] - start_time,
                )
            evaluation_seconds += line["time"] - previous_time
        previous_time = line["time"]
    return None


def run(name: str, task: Task, seed: int, folder: Path) -> Run:
    """Train with one framework to the target.

    Args:
        name: `rlsys` or `trl`.
        task: the task.
        seed: run.seed.
        folder: folder of the run and the log.

    Raises:
        Failed: the framework ended before it reached the target, or did not reach it in time.
    """
    # No warm-up: TRL has a constant learning rate, and the first steps determine which one reaches the target first.
    config = [CONFIG, "trainer.warmup_steps=0", *task.overrides, f"run.seed={seed}"]
    if name == "rlsys":
        command = ["-m", "rlsys.cli.main", "train", *config, f"run.dir={folder}/run", "eval.interval=1"]
        out, paths, threads = folder / "run" / "metrics.jsonl", [ROOT], 1
    else:
        out = folder / "trl.jsonl"
        command = ["bench/race_trl.py", CONFIG, str(out), *config[1:], "--target", str(task.target)]
        paths, threads = [ROOT, PARITY_FOLDER], os.cpu_count() or 1
    env = {**os.environ, **CPU_HOST, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    start_time = time.time()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while time.time() < start_time + task.time_limit:
            has_ended = process.poll() is not None
            text = out.read_text() if out.exists() else ""
            lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if (result := read_run(lines, start_time, task.target)) is not None:
                return result
            if has_ended:
                raise Failed(
                    f"ended with exit code {process.returncode} before it reached an accuracy of {task.target}; "
                    f"last lines of the log: {_last_lines(folder / f'{name}.log')}"
                )
            time.sleep(POLL_SECONDS)
        raise Failed(f"no accuracy of {task.target} within {task.time_limit:.0f} s")
    finally:
        _end(process)


def _last_lines(log: Path) -> str:
    """Return the last three lines of a log as one line."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a framework's process with its children, so that the next run has the whole machine."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, signal_number)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def race(name: str, task: Task, seeds: int) -> dict[str, Any]:
    """Train a task with both frameworks and several seeds.

    Args:
        name: name of the task, for messages.
        task: the task.
        seeds: number of seeds.

    Returns:
        figures of each framework and their ratios, over the seeds with which both reached the target, and the
        messages of failed runs.
    """
    runs: dict[str, list[Run]] = {"rlsys": [], "trl": []}
    failed: list[str] = []
    for seed in range(seeds):
        order = ("rlsys", "trl") if seed % 2 == 0 else ("trl", "rlsys")
        pair: dict[str, Run] = {}
        for framework in order:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    pair[framework] = run(framework, task, seed, Path(folder))
                    say(f"{name} seed {seed} {framework}: {pair[framework]}")
                except Failed as e:
                    failed.append(f"{name} seed {seed} {framework}: {e}")
                    say(failed[-1])
        if len(pair) == 2:
            for framework, framework_run in pair.items():
                runs[framework].append(framework_run)
    result: dict[str, Any] = {"target": task.target, "pairs": len(runs["trl"]), "failed": failed}
    return result | compare(runs["rlsys"], runs["trl"]) if runs["trl"] else result


def compare(rlsys_runs: Sequence[Run], trl_runs: Sequence[Run]) -> dict[str, Any]:
    """Return the spread of each figure of both frameworks, and of TRL's seconds over rlsys' in the pairs of runs."""
    result: dict[str, Any] = {
        framework: {
            field: spread([float(getattr(each, field)) for each in runs])
            for field in Run.__dataclass_fields__
        }
        for framework, runs in (("rlsys", rlsys_runs), ("trl", trl_runs))
    }
    pairs = list(zip(rlsys_runs, trl_runs, strict=True))
    result["sooner_without_start"] = spread([trl.step_seconds / rlsys.step_seconds for rlsys, trl in pairs])
    result["sooner_from_start"] = spread(
        [
            (trl.start_seconds + trl.step_seconds) / (rlsys.start_seconds + rlsys.step_seconds)
            for rlsys, trl in pairs
        ]
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one step: checks only that the bench runs"
    )
    args = parser.parse_args()
    if not PARITY_STAMP.exists():
        sys.exit(f"{PARITY_STAMP}: no such file, so TRL is not installed; expected `make setup-test` first")
    tasks = {"quick": QUICK} if args.quick else {name: TASKS[name] for name in args.tasks}
    seeds = 1 if args.quick else args.seeds
    task_figures = {name: race(name, task, seeds) for name, task in tasks.items()}
    summary = {
        f"{name}_{ratio}": figures[ratio]["median"]
        for name, figures in task_figures.items()
        for ratio in ("sooner_without_start", "sooner_from_start")
        if ratio in figures
    }
    results = {"machine": machine(), "tasks": task_figures, "summary": summary}
    print(json.dumps(results) if args.json else json.dumps(results, indent=2))
    return 1 if any(figures["failed"] for figures in task_figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
