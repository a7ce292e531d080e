"""One test for each finding of the review field.md (tests/findings_world.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.cli import main
from rlsys.config import Config, load_config
from rlsys.core.machines import machines
from rlsys.engine.launch_args import engine_command
from rlsys.planner.capacity import forecast_step
from rlsys.planner.model_preflight import read_model

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "configs" / "models" / "Qwen3-30B-A3B"
FIRST = (f"model.path={REAL}", "launch.gpus_per_node=8", "eval.prompts=4")
"""What a user changes in the quickstart for a first run of a real model on eight GPUs."""


def real(*overrides: str) -> Config:
    return load_config(Path("quickstart"), [*FIRST, *overrides])


def test_field_03_the_pool_of_an_engine_on_a_gpu_is_sized_by_its_memory() -> None:
    argv, _ = engine_command(real("model.dtype=bfloat16"), 0, 3100)
    assert "--max-total-tokens" not in argv


def test_field_04_a_small_pool_makes_generation_longer() -> None:
    sizes = ("rollout.groups_per_step=32", "rollout.group_size=8", "rollout.max_response_tokens=8192")
    small, large = (
        real("model.dtype=bfloat16", *sizes, f"engine.max_total_tokens={tokens}")
        for tokens in (81_920, 2_000_000)
    )
    small_time, large_time = (
        forecast_step(c, read_model(c), machines()["h100"]).generation for c in (small, large)
    )
    assert small_time > large_time


def test_field_09_explain_warns_of_a_toys_learning_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main.main(["explain", "quickstart", *FIRST, "trainer.lr=1e-4"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    odd = output.partition("odd")[2]
    assert "trainer.lr" in odd


@pytest.mark.gate
def test_field_09_the_planner_finds_a_layout_for_a_real_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code = main.main(["plan", "quickstart", *FIRST, "--gpus", "8", "--steps", "1"])
    assert code == 0, capsys.readouterr().err
