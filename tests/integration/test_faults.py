"""Deaths and stops in mid-run, on the real stack: the same command goes on, and the ledger stays exact.

In the long test one run folder goes through all of it, because every start costs an engine start: the trainer is
killed, then Ctrl-C, then an engine is killed, then the rollout process; at the end the run has all its steps, once.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.run_keys import check_secrets
from tests.helpers.servers import ROOT
from tests.helpers.sessions import GROUPS, RLSYS, Session, as_json, check_ledger

STEPS = 12

pytestmark = pytest.mark.integration


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Session]]:
    """Begin a run of so many steps, or go on with it."""
    sessions: list[Session] = []

    def begin(steps: int) -> Session:
        sessions.append(Session(tmp_path / "run", f"trainer.steps={steps}"))
        return sessions[-1]

    yield begin
    for session in sessions:
        session.kill()


@pytest.mark.gate
def test_a_killed_trainer_costs_no_step_and_no_token(start: Callable[[int], Session], tmp_path: Path) -> None:
    """kill -9 in its third step or after it: what no checkpoint holds is trained again, from the same groups.

    Before it: nobody but the run's user can read the keys of its engine, and they are needed.
    """
    session = start(4)
    session.wait_for_steps(1)
    check_secrets(tmp_path / "run", session.processes())
    session.wait_for_steps(3)
    session.find("rlsys.train", "--config").send_signal(signal.SIGKILL)
    code, output = session.end()
    assert code == 0, output
    assert "restart 1" in output
    assert check_ledger(tmp_path / "run")["trained"] == 4 * GROUPS
    assert [s["step"] for s in read_metrics(tmp_path / "run").steps] == [1, 2, 3, 4]


def test_a_run_survives_deaths_and_stops(start: Callable[[int], Session], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    session = start(STEPS)
    session.wait_for_steps(3)
    session.find("rlsys.train", "--config").send_signal(signal.SIGKILL)
    session.wait_for_steps(5)  # two of them in the new trainer, or again
    session.send(signal.SIGINT)
    code, output = session.end()
    assert code == 130
    assert "trainer died (killed by signal 9 (SIGKILL), " in output and "; restart 1" in output
    assert output.splitlines()[-1].startswith("rlsys: error: stopped by SIGINT")
    check_ledger(run_dir)

    session = start(STEPS)
    session.wait_for_steps(1)
    session.find("rlsys.engine.server").send_signal(signal.SIGKILL)
    session.wait_for_steps(2)
    session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
    code, output = session.end()
    assert code == 0, output
    assert "engine-0 died (killed by signal 9 (SIGKILL), probably out of memory: " in output
    assert "rollout died (killed by signal 9 (SIGKILL), probably out of memory: " in output
    assert "restart 1, with trainer" in output

    assert check_ledger(run_dir)["trained"] == STEPS * GROUPS
    steps = read_metrics(run_dir).steps
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    _, summary = as_json("report", str(run_dir))
    assert summary["sessions"] == 4  # two commands, and two restarts of the trainer
    assert summary["tokens_lost"] == 0


@pytest.mark.parametrize(
    ("override", "code", "told"),
    [
        ("engine.extra_args=[--no-such-option]", 1, "engine-0 exited with code 2"),
        ("data.source=chain_sums_tail", 2, "data.source = 'chain_sums_tail': unknown name; did you mean"),
    ],
)
def test_a_role_that_cannot_start_is_one_line(tmp_path: Path, override: str, code: int, told: str) -> None:
    command = [*RLSYS, "train", "configs/quickstart.yaml", f"run.dir={tmp_path}/run", override]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == code, process.stderr
    assert told in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
