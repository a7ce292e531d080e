"""Tasks in the formats of verl, slime, TRL and prime-rl train three steps on the real stack, their files unedited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.peers import FOLDER, PEERS, write_task
from tests.helpers.runs import ROOT

pytestmark = pytest.mark.integration

SMALL = ("trainer.steps=3", "rollout.groups_per_step=4", "eval.interval=3")


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_framework_task_trains_three_steps(peer: str, tmp_path: Path) -> None:
    config = write_task(peer, tmp_path)
    path = os.pathsep.join([str(ROOT), str(FOLDER / "prime_rl")])  # and the stand-in for verifiers
    command = [
        sys.executable,
        "-m",
        "rlsys.cli.main",
        "train",
        str(config),
        *SMALL,
        f"run.dir={tmp_path}/run",
    ]
    process = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    metrics = read_metrics(tmp_path / "run")
    assert [s["step"] for s in metrics.steps] == [1, 2, 3]
    assert all(s["lost"] == 0 and s["reward_failed"] == 0 and s["censored"] == 0 for s in metrics.steps)
    assert all(s["grad_norm"] > 0 for s in metrics.steps), "rewards differ within groups"
    if peer == "verl":
        assert min(s["reward"] for s in metrics.steps) < 1
        # Of a later step other samples were scored since the take before; or none, where all were scored by then.
        assert all(0 <= s.get("reward_figure_acc", 0) <= 1 for s in metrics.steps)
        first = metrics.steps[0]
        assert first["reward"] == pytest.approx(2 * first["reward_figure_acc"] - 1, abs=0.6)
    if peer == "trl":
        assert all(
            set(s) >= {"reward_part_correctness_reward", "reward_part_format_reward"} for s in metrics.steps
        )
