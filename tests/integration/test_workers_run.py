"""Runs of the real stack with two rollout workers: one of them is killed, and the coordinator."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rlsys.ledger.reader import RunReader
from rlsys.obs.metrics import read_metrics
from tests.helpers.sessions import GROUPS, Session, check_ledger, step_lines
from tests.integration.test_environment_run import OVERRIDES

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1200)]

STEPS = 8
TWO = (f"trainer.steps={STEPS}", "engine.count=2", "rollout.workers=2")


def test_a_run_continues_after_a_worker_is_killed(tmp_path: Path) -> None:
    """Its samples go on with the next worker, and its engine after a push of its own; the trainer hears nothing."""
    run_dir = tmp_path / "run"
    session = Session(run_dir, *TWO)
    try:
        session.wait_for_steps(2)
        killed = session.find("rlsys.worker.worker", "--number", "1")
        killed.kill()
        count = step_lines(run_dir)
        session.wait_for(lambda: step_lines(run_dir) > count)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    check_run(run_dir)
    log = (run_dir / "logs" / "rollout.log").read_text()
    assert "rollout worker 1: exited, killed by signal 9 (SIGKILL), probably out of memory" in log


@pytest.mark.parametrize("kind", sorted(OVERRIDES))
def test_environments_and_agents_of_two_workers_outlive_worker_and_coordinator(
    kind: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    session = Session(run_dir, *OVERRIDES[kind], *TWO)
    try:
        session.wait_for_steps(2)
        session.find("rlsys.worker.worker", "--number", "1").kill()
        session.wait_for_steps(4)
        session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    check_run(run_dir)
    samples = [s for g in RunReader(run_dir).groups("train_step = ?", STEPS) for s in g.samples]
    assert any(s.observed for s in samples), "a second try"
    if kind == "environment":
        assert all(s.turn_rewards is not None and len(s.turn_rewards) == len(s.turns()) for s in samples)


def check_run(run_dir: Path) -> None:
    ledger = check_ledger(run_dir)
    assert ledger["trained"] == STEPS * GROUPS and ledger["lost"] == 0
    steps = read_metrics(run_dir).steps
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert max(s["mismatch_mean"] for s in steps if "mismatch_mean" in s) < 1e-5
