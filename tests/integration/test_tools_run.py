"""A whole run with tools: GRPO-RoC's recipe from the engine to the trainer, and what its selector is told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rlsys.algo import build
from rlsys.core.types import SampleGroup
from rlsys.data import Tokenizer
from rlsys.generators.tools import NO_CALL, tool_penalty
from rlsys.ledger.reader import RunReader
from rlsys.trainer.step import sample_table
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS, check_ledger

pytestmark = pytest.mark.integration

RECIPE = "configs/algorithms/grpo_roc.yaml"
CALLS = "{opens: <answer>, closes: </answer>, max_turns: 2}"
"""The quickstart's model has not learned to call: what it says in its first turn is taken for one."""
SMALL = (
    "trainer.steps=2", "trainer.checkpoint_every=2", "rollout.groups_per_step=4", "rollout.group_size=4",
    "rollout.max_response_tokens=160", "eval.interval=100", "eval.prompts=8", "engine.max_running_requests=32",
)  # fmt: skip


def test_a_run_with_tools_trains_the_cleanest_successes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*RLSYS, "train", RECIPE, f"run.dir={run}", f"rollout.generator_params={CALLS}", *SMALL]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    check_ledger(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 2
    groups = RunReader(run).groups("state = 'trained' AND train_step = ?", 1)
    tell_penalties(groups)
    samples = [s for g in groups for s in g.samples]
    assert [len(g.samples) for g in groups] == [8] * 4, "twice rollout.group_size"
    calling_samples = [s for s in samples if s.observed]
    assert calling_samples and all(
        not any(s.trained()[a.start : a.end]) for s in calling_samples for a in s.observed
    )
    assert len({s.tool_penalty for s in samples}) > 1
    assert all(s.tool_penalty >= NO_CALL for s in samples if not s.observed)

    (selector,) = [build("selector", "grpo_roc", keep=0.5, penalty="tools")]
    table = sample_table(groups, 1, {"tool_penalty"})
    selection = selector(table, None) > 0
    assert int(selection.sum()) == 16
    assert steps[0]["effective_groups"] <= 4
    for first in range(0, len(samples), 8):
        rows = range(first, first + 8)
        won = [r for r in rows if float(table.reward[r]) > 0.5]
        worst_kept = max((samples[r].tool_penalty for r in won if selection[r]), default=0.0)
        assert all(samples[r].tool_penalty >= worst_kept for r in won if not selection[r])


def tell_penalties(groups: list[SampleGroup]) -> None:
    """As the rollout does at take."""
    tokenizer = Tokenizer(ROOT / "configs/models/quickstart-moe")
    for sample in (s for g in groups for s in g.samples):
        sample.tool_penalty = tool_penalty(sample, tokenizer.decode)
