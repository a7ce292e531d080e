"""Whole runs through sbatch on a real Slurm cluster: two and three nodes, nodes' deaths, a preemption, scancel."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlsys.obs.metrics import read_metrics
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
from tests.helpers.slurm_cluster import PREEMPTION_GRACE, SlurmCluster

pytestmark = pytest.mark.cluster
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


def submit(slurm: SlurmCluster, run: Path, *overrides: str) -> str:
    """The id of the job that `rlsys submit` printed."""
    command = [*RLSYS, "submit", "configs/quickstart.yaml", f"run.dir={run}", *TINY, *overrides]
    process = subprocess.run(command, cwd=ROOT, env=slurm.env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def wait_for_end(slurm: SlurmCluster, job: str, run: Path) -> None:
    slurm.wait(lambda: slurm.job_state(job) in ENDED)
    assert slurm.job_state(job) == "COMPLETED", logs_of(run)


def wait_for_step(slurm: SlurmCluster, job: str, run: Path, step: int) -> None:
    slurm.wait(lambda: steps_done(run) >= step or slurm.job_state(job) in ENDED)
    assert steps_done(run) >= step, logs_of(run)


def resumed_at(run: Path, time: int) -> int:
    """Of the run's `time`-th resume, the steps that its checkpoint held."""
    return [int(r["step"]) for r in read_metrics(run).runs if r["event"] == "resume"][time]


def test_a_colocated_run_on_two_nodes_matches_the_single_node_curve(
    slurm: SlurmCluster, tmp_path: Path, local_curve: list[dict[str, Any]]
) -> None:
    run = tmp_path / "run"
    job = submit(slurm, run, *SYNCHRONOUS, "launch.nodes=2")
    wait_for_end(slurm, job, run)
    assert same_curve(curve(run), local_curve), (curve(run), local_curve)
    assert (run / "logs" / "trainer-1.log").exists()
    checked_ledger(run)


def test_an_asynchronous_run_survives_its_cluster(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Engine on a node of its own, trainer over two others, through a node's death, a preemption and scancel."""
    run = tmp_path / "run"
    job = submit(
        slurm, run, "trainer.steps=1000", "launch.nodes=3", "launch.placement=disaggregated",
        "weights.method=broadcast", "rollout.over_provision=2", "rollout.max_staleness=4",
        f"launch.preemption_seconds={PREEMPTION_GRACE - 2}",
    )  # fmt: skip
    wait_for_step(slurm, job, run, 2)

    slurm.kill_node("node3")
    slurm.wait(lambda: slurm.job_state(job) == "PENDING", "the job is not requeued")
    last_step = steps_done(run)
    slurm.start_node("node3")
    wait_for_step(slurm, job, run, last_step + 2)
    assert resumed_at(run, 0) >= last_step - 1

    urgent = slurm.run(
        "sbatch",
        "--parsable",
        "--partition=high",
        "--nodes=3",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=true",
    )
    slurm.wait(lambda: slurm.job_state(urgent.strip()) == "COMPLETED")
    last_step = steps_done(run)
    tokens = checked_ledger(run)["tokens"]
    wait_for_step(slurm, job, run, last_step + 2)
    assert resumed_at(run, 1) >= last_step - 1
    tokens_after = checked_ledger(run)["tokens"]
    assert sum(tokens_after.values()) > sum(tokens.values())

    slurm.run("scancel", job)
    slurm.wait(lambda: slurm.job_state(job) == "CANCELLED")
    slurm.wait(lambda: not slurm.job_processes(), "processes are left")
    checked_ledger(run)
    steps = read_metrics(run).steps
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1)), "the curve has no gap"


def test_a_run_outlives_the_node_of_an_engine(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two engines on nodes of their own. One node dies: nothing is queued or started again."""
    run = tmp_path / "run"
    job = submit(
        slurm, run, "trainer.steps=1000", "launch.nodes=3", "launch.placement=disaggregated", "engine.count=2",
        "weights.method=broadcast", "launch.min_engines=1", "rollout.over_provision=2", "rollout.max_staleness=4",
    )  # fmt: skip
    wait_for_step(slurm, job, run, 2)
    slurm.kill_node("node3")
    try:
        last_step = steps_done(run)
        wait_for_step(slurm, job, run, last_step + 3)
        assert slurm.job_state(job) == "RUNNING"
        assert [r["event"] for r in read_metrics(run).runs] == ["start"], "the trainer has not been restarted"
        assert "continuing without engine-1" in (run / "logs" / "supervisor.log").read_text()
        slurm.run("scancel", job)
        slurm.wait(lambda: not slurm.job_processes(), "processes are left")
        checked_ledger(run)
    finally:
        slurm.start_node("node3")


def test_a_spare_node_replaces_a_failed_trainer_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The run goes on from its checkpoint in the same session of the same job."""
    run = tmp_path / "run"
    job = submit(slurm, run, "trainer.steps=6", "launch.nodes=2", "launch.spare_nodes=1")
    wait_for_step(slurm, job, run, 2)
    last_step = steps_done(run)
    slurm.kill_node("node2")
    try:
        wait_for_end(slurm, job, run)
        assert "Restarts=0" in slurm.run("scontrol", "--oneliner", "show", "job", job)
        assert resumed_at(run, 0) >= last_step - 1
        checked_ledger(run)
    finally:
        slurm.start_node("node2")
