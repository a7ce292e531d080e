"""Whole runs through a real Ray cluster of two nodes; an engine's actor is killed in the middle of one."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.runs import (
    RLSYS,
    ROOT,
    SYNCHRONOUS,
    TINY,
    checked_ledger,
    curve,
    logs_of,
    same_curve,
    steps_done,
)

pytestmark = pytest.mark.cluster
PATIENCE = 400.0


def start(address: str, run: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [*RLSYS, "train", "configs/quickstart.yaml", f"run.dir={run}", *TINY, *overrides]
    return subprocess.Popen(
        [*command, "launch.backend=ray", "launch.nodes=2"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "RAY_ADDRESS": address},
    )  # fmt: skip


def end(process: subprocess.Popen[str], run: Path) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output + logs_of(run)
    return output


def actor_of(*words: str) -> psutil.Process:
    """The Ray actor whose keeper runs the command with these words."""
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "launch.keeper" in line and set(words) <= set(line):
            return next(p for p in process.parents() if p.name().startswith("ray::"))
    raise AssertionError(f"no keeper of {words}")


@pytest.mark.slow
def test_colocated_on_two_nodes_learns_what_one_machine_learns(
    ray_cluster: str, tmp_path: Path, local_curve: list[dict[str, Any]]
) -> None:
    run = tmp_path / "run"
    end(start(ray_cluster, run, *SYNCHRONOUS), run)
    assert same_curve(curve(run), local_curve), (curve(run), local_curve)
    assert (run / "logs" / "trainer-1.log").exists()
    checked_ledger(run)


def test_an_engine_whose_actor_is_killed_comes_back(ray_cluster: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        ray_cluster, run, "trainer.steps=6", "launch.placement=disaggregated", "weights.method=disk",
        "rollout.over_provision=2", "rollout.max_staleness=4",
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    while steps_done(run) < 2:
        assert process.poll() is None and time.monotonic() < deadline, logs_of(run)
        time.sleep(0.1)
    actor_of("sglang.launch_server", "127.0.0.3").kill()
    output = end(process, run)
    assert "engine-0 died (exit code 255); restart 1" in output
    assert steps_done(run) == 6
    checked_ledger(run)
