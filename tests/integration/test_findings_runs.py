"""Findings of world.md and facts/pretrained.md that only a real run shows (tests/findings_world.md)."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.runs import RLSYS, ROOT, TINY, steps_done

pytestmark = pytest.mark.integration
SHORT = (*TINY, "rollout.groups_per_step=2", "rollout.group_size=2", "rollout.max_response_tokens=32")
SYNCHRONOUS = ("rollout.over_provision=1", "rollout.max_staleness=0", "parallel.ep=1")


def rlsys(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RLSYS, *words], cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_world_12a_changed_data_is_refused_at_the_start(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(200)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ("data.source=jsonl", f"data.params={{path: {data}}}", "data.reward=exact_answer")
    command = ("train", "quickstart", f"run.dir={tmp_path}/run", *SHORT, *SYNCHRONOUS, *source)
    first = rlsys(*command, "trainer.steps=1")
    if first.returncode:
        pytest.fail(first.stderr)  # no AssertionError: the run before the change must succeed
    data.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows[:100])))
    second = rlsys(*command, "trainer.steps=2")
    assert second.returncode == 2 and "rows.jsonl" in second.stderr


def test_pretrained_s4_evaluation_samples_are_stored(tmp_path: Path) -> None:
    overrides = (f"run.dir={tmp_path}/run", *SHORT, "eval.prompts=2")
    eval_process = rlsys("eval", "quickstart", *overrides)
    if eval_process.returncode:
        pytest.fail(eval_process.stderr)
    folder = next(path.parent for path in sorted(tmp_path.rglob("metrics.jsonl")))
    samples_process = rlsys("samples", str(folder))
    assert samples_process.returncode == 0, samples_process.stderr


def test_pretrained_s5_a_stopped_run_reports_its_resume_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = (*SHORT, *SYNCHRONOUS, "trainer.checkpoint_every=100", "launch.preemption_seconds=0.01")
    command = [*RLSYS, "train", "quickstart", f"run.dir={run}", *overrides, "trainer.steps=100"]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as p:
        while steps_done(run) < 1 and p.poll() is None:
            time.sleep(0.2)
        p.send_signal(signal.SIGTERM)
        stderr = p.communicate(timeout=300)[1]
    last = [line for line in stderr.splitlines() if line.startswith("rlsys: error:")][-1:]
    assert last and "step" in last[0], stderr[-2000:]
