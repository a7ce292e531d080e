"""Trackers hold every line of metrics once, whatever is killed and resumed; the real packages, where they are."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsys.cli import main
from rlsys.cli.view import feed_trackers
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.obs.metrics import run_id
from rlsys.viewer.trackers import follow as following
from rlsys.viewer.trackers.follow import Follower, follow
from rlsys.viewer.trackers.tracker import PACKAGES, Row, TrackedRun, check_trackers
from tests.helpers.seen_run import write_run
from tests.helpers.tracker_files import READERS, first_values, read_mlflow


class InMemory:
    """A tracker that a kill leaves as it is."""

    held: list[tuple[str, int, dict[str, float], Sequence[Row]]]
    runs: list[TrackedRun]

    def __init__(self, run: TrackedRun) -> None:
        self.runs.append(run)

    def last_steps(self) -> dict[str, int]:
        return {kind: step for kind, step, _, _ in self.held}

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        self.held.append((kind, step, values, samples))

    def close(self) -> None:
        pass


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> type[InMemory]:
    monkeypatch.setattr(InMemory, "held", [], raising=False)
    monkeypatch.setattr(InMemory, "runs", [], raising=False)
    monkeypatch.setattr(following, "open_tracker", lambda _, run: InMemory(run))
    monkeypatch.setattr(following, "check_trackers", lambda _: None)
    return InMemory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps in a folder with room beside it."""
    (tmp_path / "mine").mkdir()
    return write_run(tmp_path / "mine")


def add_lines(run: Path, *lines: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def resume_with_a_repeated_step(run: Path) -> None:
    """From a checkpoint of step 1: step 2 is trained again, and says something else now."""
    add_lines(
        run,
        {"kind": "run", "event": "resume", "step": 1, "time": 200.0},
        {"kind": "step", "step": 2, "time": 205.0, "reward": 0.9, "tokens": 20},
        {"kind": "step", "step": 3, "time": 209.0, "reward": 0.75, "tokens": 21},
        {"kind": "eval", "step": 3, "time": 210.0, "accuracy": 1.0, "prompts": 4},
    )


def test_a_tracker_gets_every_line_once_over_a_resume(run: Path, tracker: type[InMemory]) -> None:
    follower = Follower(run, ["wandb"])
    follower.catch_up()
    resume_with_a_repeated_step(run)
    again = Follower(run, ["wandb"])  # the process was killed; another one begins
    again.catch_up()
    records = [(kind, step, values.get("reward")) for kind, step, values, _ in tracker.held]
    assert records == [
        ("eval", 0, None),
        ("step", 1, 0.25),
        ("step", 2, 0.5),
        ("step", 3, 0.75),
        ("eval", 3, None),
    ]
    first, second = tracker.runs
    assert first.run_id == second.run_id and len(first.run_id) == 16


def test_other_runs_have_other_ids() -> None:
    assert len({run_id("a", 1.0), run_id("b", 1.0), run_id("a", 2.0)}) == 3


def test_a_table_of_samples_where_an_evaluation_is_due(
    run: Path, tracker: type[InMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(run / "config.yaml")
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace(f"interval: {config.eval.interval}", "interval: 2")
    )
    assert follow(run, ["wandb"], end_descriptor=None) == {"wandb": 3}
    tables = {step: rows for kind, step, _, rows in tracker.held if kind == "step"}
    assert tables[1] == []
    worst = tables[2][0]
    assert (worst["reward"], worst["response"], worst["answer"], worst["step"]) == (0.0, "17", "17", 2)


def test_a_package_that_is_missing_is_one_line_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"run.trackers = \[wandb\]: the package wandb is not installed"):
        check_trackers(["wandb"])


def test_track_without_a_tracker_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["track", str(run)]) == 2
    assert "run.trackers is empty; expected --to with one of mlflow, wandb" in capsys.readouterr().err


def test_a_tracker_that_fails_ends_no_run(run: Path) -> None:
    config = load_config(run / "config.yaml", ["run.trackers=[wandb]", f"run.dir={run}"])
    (run / "config.yaml").unlink()  # its process ends at once
    messages: list[str] = []
    with feed_trackers(config, messages.append):
        pass
    assert len(messages) == 1 and "rlsys track" in messages[0]


# -- the packages themselves -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=pytest.mark.skipif(importlib.util.find_spec(p) is None, reason=f"{p} is not installed")
        )
        for n, p in PACKAGES.items()
    ],
)
def test_read_back_equal_after_a_kill_and_a_resume(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        text.replace("trackers: []", f"trackers: [{name}]").replace("every: 10", "every: 2")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "rlsys.viewer.trackers.follow", str(run)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    reader = READERS[name]
    while ("step", 1) not in reader(run):  # W&B writes to its file every 15 seconds; the bound is the test's
        assert process.poll() is None, "the follower ended"
        time.sleep(0.5)
    os.killpg(process.pid, 9)
    process.wait()
    resume_with_a_repeated_step(run)
    track_process = subprocess.run(
        [sys.executable, "-m", "rlsys.cli.main", "track", str(run)], capture_output=True, text=True
    )
    assert track_process.returncode == 0, track_process.stderr
    records = reader(run)
    assert {key: v.get("reward", v.get("accuracy")) for key, v in sorted(records.items())} == {
        ("eval", 0): 0.25, ("eval", 3): 1.0, ("step", 1): 0.25, ("step", 2): 0.5, ("step", 3): 0.75
    }  # fmt: skip
    assert records == first_values(run)
    once_more = subprocess.run(track_process.args, capture_output=True, text=True)
    assert f"{name}: 0 lines written" in once_more.stdout


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_an_ended_run_has_sent_all_lines_to_its_trackers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    text = (run / "config.yaml").read_text().replace("trackers: []", "trackers: [mlflow]")
    (run / "config.yaml").write_text(text)
    messages: list[str] = []
    with feed_trackers(load_config(run / "config.yaml"), messages.append):
        add_lines(run, {"kind": "step", "step": 3, "time": 112.0, "reward": 0.75})
    assert messages == []
    assert sorted(read_mlflow(run)) == [("eval", 0), ("step", 1), ("step", 2), ("step", 3)]
