"""Whole runs through a real Ray cluster of two nodes; an engine's actor is killed in the middle of one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import (
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

pytestmark = [
    pytest.mark.cluster,
]  # up to three engine starts, each a minute at worst
PATIENCE = 800.0
ASYNCHRONOUS = (
    "launch.placement=disaggregated",
    "weights.method=disk",
    "rollout.over_provision=2",
    "rollout.max_staleness=4",
)


@contextlib.contextmanager
def started(cluster: RayCluster, run: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Whatever a test finds: nothing of its run is left."""
    command = [*RLSYS, "train", "configs/quickstart.yaml", f"run.dir={run}", *TINY, *overrides]
    with subprocess.Popen(
        [*command, "launch.backend=ray", "launch.nodes=2"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "RAY_ADDRESS": cluster.address},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()  # its actors end with it


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


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while steps_done(run) < step:
        assert process.poll() is None and time.monotonic() < deadline, logs_of(run)
        time.sleep(0.1)


def diagnosis(run: Path, *until: str) -> str:
    """What the doctor says as soon as it says one of `until`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        process = subprocess.run([*RLSYS, "doctor", str(run)], cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        if any(words in process.stdout for words in until):
            return process.stdout
        assert time.monotonic() < deadline, process.stdout


@pytest.mark.slow
def test_a_colocated_run_on_two_nodes_matches_the_single_node_curve(
    ray_cluster: RayCluster, tmp_path: Path, local_curve: list[dict[str, Any]]
) -> None:
    run = tmp_path / "run"
    with started(ray_cluster, run, *SYNCHRONOUS) as process:
        end(process, run)
    assert same_curve(curve(run), local_curve), (curve(run), local_curve)
    assert (run / "logs" / "trainer-1.log").exists()
    checked_ledger(run)


@pytest.mark.gate
def test_a_hung_engine_is_diagnosed_and_restarts_once_its_actor_dies(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(ray_cluster, run, "trainer.steps=6", *ASYNCHRONOUS) as process:
        wait_for_step(process, run, 2)
        actor = actor_of("rlsys.engine.server", "127.0.0.3")
        scheduler = next(p for p in actor.children(recursive=True) if "scheduler" in p.name())
        scheduler.suspend()
        waits = "trainer-rank0    waits for the rollout process: "
        report = diagnosis(
            run, waits + "to interrupt the engines before a push", waits + "groups of the next step"
        )
        assert "trainer-rank1    waits for the other ranks" in report, report
        for name in ("engine-0", "rollout", "trainer-rank1"):
            assert f"stack of {name}" in report, report
        actor.kill()
        output = end(process, run)
    assert "engine-0 died (exit code 255); restart 1" in output
    assert steps_done(run) == 6
    checked_ledger(run)


@pytest.mark.slow
def test_a_run_continues_after_replacing_a_lost_node(ray_cluster: RayCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(ray_cluster, run, "trainer.steps=6", *ASYNCHRONOUS) as process:
        wait_for_step(process, run, 2)
        ray_cluster.kill(1)
        ray_cluster.add()
        output = end(process, run)
    assert "node 127.0.0.3 is lost; replacing" in output
    assert "engine-0 ready" in output.split("replacing")[1]
    assert [step["step"] for step in read_metrics(run).steps] == list(range(1, 7))
    checked_ledger(run)
