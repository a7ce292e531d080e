"""Deaths and stops in mid-run, on the real stack: the same command goes on, and the ledger stays exact.

One run folder goes through all of it, because every start costs an engine start: the trainer is killed, then
Ctrl-C, then an engine is killed, then the rollout process; at the end the run has all its steps, each once.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.obs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
SMALL = (
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "eval.every=100",
    "eval.prompts=8",
    "engine.max_running_requests=32",
    "launch.grace_seconds=10",
)
RLSYS = (sys.executable, "-m", "rlsys.cli")
PATIENCE = 400.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # three starts of the whole stack


class Session:
    """One `rlsys train` on the folder, and the processes it started."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lines_before = step_lines(run_dir)
        command = [*RLSYS, "train", "configs/quickstart.yaml", f"run.dir={run_dir}", *SMALL]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._seen: list[psutil.Process] = []

    def wait_for_steps(self, more: int) -> None:
        """Until this session has trained `more` steps. Fails the test when the run ends before."""
        self._wait(lambda: step_lines(self._run_dir) >= self._lines_before + more)

    def find(self, *words: str) -> psutil.Process:
        """The innermost process whose command line has all of `words`."""
        self._seen = psutil.Process(self._process.pid).children(recursive=True)
        fitting = [p for p in self._seen if set(words) <= set(p.cmdline())]
        return fitting[-1]

    def interrupt(self) -> None:
        self.find()
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code and output, after making sure that nothing of it is left."""
        output, _ = self._process.communicate(timeout=PATIENCE)
        _, alive = psutil.wait_procs(self._seen, timeout=5)
        assert not alive, f"orphans: {alive}"
        return self._process.returncode, output

    def kill(self) -> None:
        """For a test that failed: its keepers end the rest."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _wait(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                assert self._process.stdout is not None
                pytest.fail(f"the run ended or hung: {self._process.stdout.read()}")
            time.sleep(0.1)


def step_lines(run_dir: Path) -> int:
    """Steps trained so far, counted as often as they were trained."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def as_json(*args: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([*RLSYS, *args, "--json"], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Session]]:
    sessions: list[Session] = []

    def begin() -> Session:
        sessions.append(Session(tmp_path / "run"))
        return sessions[-1]

    yield begin
    for session in sessions:
        session.kill()


def check_ledger(run_dir: Path) -> dict[str, Any]:
    code, ledger = as_json("ledger", str(run_dir))
    assert code == 0, ledger
    assert (ledger["lost"], ledger["trained_twice"]) == (0, 0)
    return ledger


def test_a_run_survives_deaths_and_stops(start: Callable[[], Session], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    session = start()
    session.wait_for_steps(3)
    session.find("rlsys.train", "--config").send_signal(signal.SIGKILL)
    session.wait_for_steps(5)  # two of them in the new trainer, or again
    session.interrupt()
    code, output = session.end()
    assert code == 130
    assert "trainer died (exit code 1); restart 1" in output
    assert output.splitlines()[-1].startswith("rlsys: error: stopped by SIGINT")
    check_ledger(run_dir)

    session = start()
    session.wait_for_steps(1)
    session.find("sglang.launch_server").send_signal(signal.SIGKILL)
    session.wait_for_steps(2)
    session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
    code, output = session.end()
    assert code == 0, output
    assert "engine-0 died (exit code 137); restart 1" in output
    assert "rollout died (exit code 137); restart 1, with trainer" in output

    assert check_ledger(run_dir)["trained"] == STEPS * 4
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, done.stderr
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
