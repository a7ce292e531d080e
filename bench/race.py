"""Seconds of rlsys and of TRL's GRPOTrainer to the same held-out accuracy, with and without the process's start.

    make setup-test && python bench/race.py --json [--seeds 5] [--tasks quickstart tail] [--quick]

Both train the same model on the same prompts with the same reward, batch, learning rate, temperature and longest
response, one after the other on the same machine, in alternating order. Each evaluates greedily after every step and
ends at the target. The figures exclude the time of evaluations. Everything else is each framework's own: TRL's loss
and its generation with transformers on all cores; rlsys' loss, APRIL and an engine next to the trainer.
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
CONFIG = "configs/quickstart.yaml"


@dataclass(frozen=True)
class Task:
    target: float
    overrides: tuple[str, ...]
    patience: float
    """Seconds for one runner."""


TASKS = {
    "quickstart": Task(0.9, ("trainer.steps=40",), 1200),
    # Four times the batch, half of it long, and a learning rate that takes many steps.
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
    """A runner ended before it reached the target, or did not end in time."""


@dataclass(frozen=True)
class Run:
    """Times of one runner until it reached the target, without evaluations."""

    steps: int
    accuracy: float
    step_seconds: float
    """Seconds from the first possible train step to the end of the last one."""
    start_seconds: float
    """Seconds from the process's start until the first possible train step."""
    wall_seconds: float
    """Seconds from the process's start to the evaluation that reached the target, with all evaluations."""


def read_run(lines: Sequence[dict[str, Any]], start_time: float, target: float) -> Run | None:
    """Return the seconds of a runner from its lines `start`, `step` and `eval`; None before the target.

    An evaluation lasts from the line before it to its own. One before the first step belongs to the start.
    """
    ready, evaluations = 0.0, 0.0
    previous_time = start_time
    for line in lines:
        if line["kind"] == "run" or line["kind"] == "start" or (line["kind"] == "eval" and line["step"] == 0):
            ready = line["time"]
        elif line["kind"] == "eval":
            if line["accuracy"] >= target:
                step_seconds, wall_seconds = previous_time - ready - evaluations, line["time"] - start_time
                return Run(line["step"], line["accuracy"], step_seconds, ready - start_time, wall_seconds)
            evaluations += line["time"] - previous_time
        previous_time = line["time"]
    return None


def run(name: str, task: Task, seed: int, folder: Path) -> Run:
    """Run one runner to the target. Raises Failed if it ends before, or not in time."""
    # No warm-up: TRL has a constant learning rate, and the first steps determine which runner reaches the target.
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
        while time.time() < start_time + task.patience:
            has_ended = process.poll() is not None
            text = out.read_text() if out.exists() else ""
            lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if (result := read_run(lines, start_time, task.target)) is not None:
                return result
            if has_ended:
                raise Failed(
                    f"ended with {process.returncode} before {task.target}: {_last(folder / f'{name}.log')}"
                )
            time.sleep(POLL_SECONDS)
        raise Failed(f"accuracy did not reach {task.target} within {task.patience:.0f} s")
    finally:
        _end(process)


def _last(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a runner with all its children, so that the next runner does not share the machine."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, signal_number)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def race(name: str, task: Task, seeds: int) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {"rlsys": [], "trl": []}
    failed: list[str] = []
    for seed in range(seeds):
        order = ("rlsys", "trl") if seed % 2 == 0 else ("trl", "rlsys")
        pair: dict[str, Run] = {}
        for runner in order:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    pair[runner] = run(runner, task, seed, Path(folder))
                    say(f"{name} seed {seed} {runner}: {pair[runner]}")
                except Failed as e:
                    failed.append(f"{name} seed {seed} {runner}: {e}")
                    say(failed[-1])
        if len(pair) == 2:
            for runner, runner_run in pair.items():
                runs[runner].append(runner_run)
    result: dict[str, Any] = {"target": task.target, "pairs": len(runs["trl"]), "failed": failed}
    if not runs["trl"]:
        return result
    for runner, all_runs in runs.items():
        result[runner] = {
            field: spread([float(getattr(runner_run, field)) for runner_run in all_runs])
            for field in Run.__dataclass_fields__
        }
    pairs = list(zip(runs["rlsys"], runs["trl"], strict=True))
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
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one step: checks only that the bench runs"
    )
    args = parser.parse_args()
    if not PARITY_STAMP.exists():
        sys.exit("TRL is not installed; expected: make setup-test")
    tasks = {"quick": QUICK} if args.quick else {name: TASKS[name] for name in args.tasks}
    seeds = 1 if args.quick else args.seeds
    raced = {name: race(name, task, seeds) for name, task in tasks.items()}
    summary = {
        f"{name}_{figure}": figures[figure]["median"]
        for name, figures in raced.items()
        for figure in ("sooner_without_start", "sooner_from_start")
        if figure in figures
    }
    results = {"machine": machine(), "tasks": raced, "summary": summary}
    print(json.dumps(results) if args.json else json.dumps(results, indent=2))
    return 1 if any(figures["failed"] for figures in raced.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
