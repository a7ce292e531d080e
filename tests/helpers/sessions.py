"""`rlsys train` as a user starts it, on a small quickstart; for tests that kill parts of it."""

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
"""Of a step."""
RLSYS = (sys.executable, "-m", "rlsys.cli.main")
PATIENCE = 1000.0
"""A guard, no claim."""


class Session:
    """One `rlsys train` on the folder, and the processes it started."""

    def __init__(self, run_dir: Path, *overrides: str, config: str = "configs/quickstart.yaml") -> None:
        self._run_dir = run_dir
        self._lines_before = step_lines(run_dir)
        command = [*RLSYS, "train", config, f"run.dir={run_dir}", *SMALL, *overrides]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._seen: list[psutil.Process] = []

    def wait_for_steps(self, more: int) -> None:
        """Until this session has trained `more` steps. Fails the test when the run ends before."""
        self.wait_for(lambda: step_lines(self._run_dir) >= self._lines_before + more)

    def processes(self) -> list[psutil.Process]:
        """All that the supervisor started, directly or not."""
        self._seen = psutil.Process(self._process.pid).children(recursive=True)
        return self._seen

    def find(self, *words: str) -> psutil.Process:
        """The innermost process whose command line has all of `words`."""
        return [p for p in self.processes() if set(words) <= set(command_line(p))][-1]

    def send(self, number: signal.Signals) -> None:
        """To the supervisor."""
        self.find()
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and output, after making sure that nothing of it is left."""
        output, _ = self._process.communicate(timeout=PATIENCE)
        _, alive = psutil.wait_procs(self._seen, timeout=15)
        assert not alive, f"orphans: {alive}"
        return self._process.returncode, output

    def kill(self) -> None:
        """For a test that failed: its keepers end the rest."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_for(self, true: Callable[[], bool], look: float = 0.1) -> None:
        """Look at it every so many seconds. Fails the test when the run ends, or after PATIENCE."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                assert self._process.stdout is not None
                pytest.fail(f"the run ended or hung: {self._process.stdout.read()}")
            time.sleep(look)


def command_line(process: psutil.Process) -> list[str]:
    """Empty for one that has ended meanwhile."""
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.NoSuchProcess:
        return []


def step_lines(run_dir: Path) -> int:
    """Steps trained so far, counted as often as they were trained."""
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
    """The report: no token is lost, and trainer and engines agree on the log-probs."""
    _, summary = as_json("report", str(run_dir))
    assert summary["tokens_lost"] == 0
    assert summary["mean_abs_logprob_diff"] <= 1e-6 and summary["p999_abs_logprob_diff"] <= 1e-4
