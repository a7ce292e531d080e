"""Whole runs through a real Slurm and a real Ray while engines join, are sent away and die, as a seed says.

RLSYS_CHURN_STEPS sets the steps of a run: `RLSYS_CHURN_STEPS=200 pytest -s tests/cluster/test_churn.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.churn import Churn, draw_events
from tests.helpers.ray_cluster import RayCluster
from tests.helpers.runs import RLSYS, ROOT, TINY, checked_ledger, logs_of
from tests.helpers.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
STEPS = int(os.environ.get("RLSYS_CHURN_STEPS", "40"))
EVERY = 6
"""Steps between two events, on average."""
PATIENCE = 3600.0
GROUPS = 2
CHURNED = (
    "rollout.groups_per_step=2", "rollout.group_size=4", f"trainer.steps={STEPS}", "trainer.checkpoint_every=10",
    "parallel.ep=1", "launch.placement=disaggregated", "launch.nodes=2", "engine.count=2", "launch.min_engines=1",
    "rollout.over_provision=2", "rollout.max_staleness=4",
)  # fmt: skip


def started(run: Path, *overrides: str) -> list[str]:
    return ["configs/quickstart.yaml", f"run.dir={run}", *TINY, *CHURNED, *overrides]


def check(run: Path, churn: Churn, began: float) -> None:
    """Every step once, every group of it once, nothing lost; and the figures, for the one who reads the output."""
    steps = read_metrics(run).steps
    ledger = checked_ledger(run)
    last = steps[-1]
    figures = {
        "steps": len(steps), **churn.event_counts, "tokens_lost": last["lost"], "trained": ledger["trained"],
        "engine_deaths": last["engine_deaths"], "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    print(json.dumps(figures), *churn.log, sep="\n")
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1)), "every step once"
    assert ledger["trained"] == STEPS * GROUPS
    assert last["lost"] == 0
    assert [r["event"] for r in read_metrics(run).runs] == ["start", "end"], (
        "the trainer has not been restarted"
    )
    assert churn.event_counts["join"] and churn.event_counts["kill"], churn.log


def test_slurm(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that join are tasks of a job array, on a node that the run does not have."""
    start_time, run = time.monotonic(), tmp_path / "run"
    script = (ROOT / "slurm/engines.sbatch").read_text()
    script_path = tmp_path / "engines.sbatch"
    script_path.write_text(script.replace(".venv/bin/rlsys", f"{sys.executable} -m rlsys.cli.main"))
    command = [*RLSYS, "submit", *started(run, "weights.method=broadcast")]
    process = subprocess.run(command, cwd=ROOT, env=slurm.env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    job = process.stdout.strip()

    def going() -> bool:
        return slurm.job_state(job) in ("PENDING", "RUNNING")

    def join() -> None:
        size = ("--array=1", "--gpus-per-node=0", "--exclusive=user", "--cpus-per-task=1")
        slurm.run(
            "sbatch",
            "--chdir",
            str(ROOT),
            *size,
            f"--output={run}/logs/joiner-%A.log",
            str(script_path),
            str(run),
        )

    churn = Churn(run, join, going)
    churn.run_events(draw_events(0, STEPS, EVERY))
    slurm.wait(lambda: not going())
    assert slurm.job_state(job) == "COMPLETED", "\n".join([*churn.log, logs_of(run)])
    check(run, churn, start_time)
    slurm.wait(lambda: not churn.joiners(), "engines that joined end with the run")


def test_ray(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Engines that join are actors of the run's cluster."""
    start_time, run = time.monotonic(), tmp_path / "run"
    env = {**os.environ, "RAY_ADDRESS": ray_cluster.address, "RAY_AUTH_MODE": "disabled"}
    joiners: list[subprocess.Popen[bytes]] = []

    def join() -> None:
        command = [sys.executable, "examples/ray_engines.py", str(run), "1"]
        with (run / "logs" / f"joiner-{len(joiners)}.log").open("wb") as log:
            joiners.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))

    with ended(joiners), (tmp_path / "out").open("w+") as out:
        command = [*RLSYS, "train", *started(run, "weights.method=disk", "launch.backend=ray")]
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT) as process:
            try:
                churn = Churn(run, join, lambda: process.poll() is None)
                churn.run_events(draw_events(1, STEPS, EVERY))
                process.wait(timeout=PATIENCE)
            finally:
                process.kill()  # its actors end with it
        out.seek(0)
        assert process.returncode == 0, out.read() + logs_of(run)
        check(run, churn, start_time)
        for joiner in joiners:
            joiner.wait(timeout=PATIENCE)


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever a test finds: their engines end with them."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
