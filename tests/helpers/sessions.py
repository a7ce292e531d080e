"""`rlsys train` on a small quickstart, as a process whose parts tests can kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.servers import ROOT

SMALL = (
    "trainer.checkpoint_every=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "eval.interval=100",
    "eval.prompts=8",
    "engine.max_running_requests=32",
    "launch.grace_seconds=10",
)
GROUPS = 4
"""Groups per step."""
RLSYS = (sys.executable, "-m", "rlsys.cli.main")
TIMEOUT_S = 1000.0
"""Upper bound on waits."""


class Session:
    """One `rlsys train` process on a run folder, and its descendants."""

    def __init__(self, run_dir: Path, *overrides: str, config: str = "configs/quickstart.yaml") -> None:
        self._run_dir = run_dir
        self._lines_before = step_lines(run_dir)
        command = [*RLSYS, "train", config, f"run.dir={run_dir}", *SMALL, *overrides]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._seen: list[psutil.Process] = []

    def wait_for_steps(self, more: int) -> None:
        """Wait until this session has trained `more` steps. Fail the test if the run ends before."""
        self.wait_for(lambda: step_lines(self._run_dir) >= self._lines_before + more)

    def processes(self) -> list[psutil.Process]:
        """Return all descendants of the supervisor."""
        self._seen = psutil.Process(self._process.pid).children(recursive=True)
        return self._seen

    def find(self, *words: str) -> psutil.Process:
        """Return the innermost process whose command line contains all of `words`."""
        return [p for p in self.processes() if set(words) <= set(command_line(p))][-1]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        self.find()
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the exit, check that no descendant is alive, and return exit code and output."""
        output, _ = self._process.communicate(timeout=TIMEOUT_S)
        _, alive = psutil.wait_procs(self._seen, timeout=15)
        assert not alive, f"orphans: {alive}"
        return self._process.returncode, output

    def kill(self) -> None:
        """Kill the supervisor after a test has failed; the keepers end the other processes."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_for(self, condition: Callable[[], bool], interval: float = 0.1) -> None:
        """Poll a condition every `interval` seconds. Fail the test if the run ends, or after TIMEOUT_S."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                assert self._process.stdout is not None
                pytest.fail(f"the run ended or hung: {self._process.stdout.read()}")
            time.sleep(interval)


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or an empty list if it has ended."""
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.NoSuchProcess:
        return []


def step_lines(run_dir: Path) -> int:
    """Return the number of step lines in metrics.jsonl; a repeated step counts again."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def as_json(*args: str) -> tuple[int, dict[str, Any]]:
    process = subprocess.run([*RLSYS, *args, "--json"], cwd=ROOT, capture_output=True, text=True)
    return process.returncode, json.loads(process.stdout)


def check_ledger(run_dir: Path) -> dict[str, Any]:
    code, ledger = as_json("ledger", str(run_dir))
    assert code == 0, ledger
    assert (ledger["lost"], ledger["trained_twice"]) == (0, 0)
    return ledger


def check_agreement(run_dir: Path) -> None:
    """Check in the run's report that no token is lost, and that trainer and engines agree on log-probs."""
    _, summary = as_json("report", str(run_dir))
    assert summary["tokens_lost"] == 0
    assert summary["mean_abs_logprob_diff"] <= 1e-6 and summary["p999_abs_logprob_diff"] <= 1e-4
