"""`eval.prompts = 0`: a run without evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.describe import describe_arithmetic
from rlsys.cli.main import main
from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source
from rlsys.engine_requests import Limits
from rlsys.rollout.canaries import CANARIES, Canaries
from rlsys.rollout.dry_run import dry_run
from rlsys.train import Loop


def config(tmp_path: Path, rows: int = 1, *more: str) -> Config:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(rows))
    )
    data = f"data={{source: jsonl, params: {{path: {file}}}, reward: exact_answer}}"
    return load_config(Path("quickstart"), [data, "eval.prompts=0", f"run.dir={tmp_path / 'run'}", *more])


@pytest.mark.gate
@pytest.mark.parametrize("rows", [1, 40])
def test_a_run_without_evaluations_passes_every_check(tmp_path: Path, rows: int) -> None:
    tried = dry_run(config(tmp_path, rows))
    assert tried.rewards is not None


@pytest.mark.parametrize("step", [1, 20, 60])
def test_a_run_with_zero_eval_prompts_never_evaluates(tmp_path: Path, step: int) -> None:
    loop = cast(Any, Loop.__new__(Loop))
    loop.config, loop.step, loop.evaluating = config(tmp_path), step, None
    loop.evaluate = lambda: pytest.fail("an evaluation")
    saved: list[Any] = []
    loop.trainer = SimpleNamespace(
        finish_checkpoint=lambda wait: None, save_checkpoint=lambda *a: saved.append(a), export=None
    )
    loop.objective = None
    loop.finish_step()
    assert saved == ([] if step == 1 else [(step, None, None)])
    assert not any(loop.config.eval.due(step, last) for step in (0, 10) for last in (False, True))
    assert "no evaluations" in dict(describe_arithmetic(loop.config))["whole run"]


def test_pushes_are_compared_on_training_prompts(tmp_path: Path) -> None:
    configuration = config(tmp_path, 40)
    source = build_source(configuration, Tokenizer.of(configuration))
    canaries = Canaries(source, 0, lambda: Limits(128, 512)).sequences()
    assert canaries == [source.train(i).ids for i in range(CANARIES)]


@pytest.mark.parametrize("setting", ["eval.sets=[{name: a}]", "eval.background=true"])
def test_settings_of_evaluations_need_some(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UserError, match="prompts = 0: no evaluations"):
        config(tmp_path, 1, setting)


def test_rlsys_eval_rejects_zero_eval_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "quickstart", "eval.prompts=0", f"run.dir={tmp_path}"]) == 2
    assert "eval.prompts = 0: nothing is measured; expected more than 0" in capsys.readouterr().err
