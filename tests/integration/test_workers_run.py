"""A run of the real stack with two rollout workers, one of which is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.sessions import GROUPS, Session, check_ledger, step_lines

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1200)]

STEPS = 8


def test_a_worker_of_a_real_run_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its samples go on with the next worker, and its engine after a push of its own; the trainer hears nothing."""
    run_dir = tmp_path / "run"
    session = Session(run_dir, f"trainer.steps={STEPS}", "engine.count=2", "rollout.workers=2")
    try:
        session.wait_for_steps(2)
        killed = session.find("rlsys.rollout.worker", "--number", "1")
        killed.kill()
        count = step_lines(run_dir)
        session.wait_for(lambda: step_lines(run_dir) > count)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    assert check_ledger(run_dir)["trained"] == STEPS * GROUPS
    steps = read_metrics(run_dir).steps
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert max(s["mismatch_mean"] for s in steps if "mismatch_mean" in s) < 1e-5
    log = (run_dir / "logs" / "rollout.log").read_text()
    assert "rollout worker 1: gone, exit code -9" in log
