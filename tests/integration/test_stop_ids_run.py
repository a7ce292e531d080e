"""Whole runs of models that end with another id than the tokenizer's eos, as GLM's do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.runs import ROOT, SYNCHRONOUS, checked_ledger, train_locally
from tests.helpers.stop_families import edit

pytestmark = [pytest.mark.integration, pytest.mark.slow]

QUICKSTART = ROOT / "configs" / "models" / "quickstart-moe"


def rewards(run: Path, folder: Path) -> list[tuple[float, float]]:
    """Of each step: reward and mean length."""
    train_locally(run, *SYNCHRONOUS, f"model.path={folder}", "data.reward=reasoning_gym")
    checked_ledger(run)
    return [(step["reward_mean"], step["response_length_mean"]) for step in read_metrics(run).steps]


def test_rewards_are_those_of_the_model_whose_eos_ends_it(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(QUICKSTART, other)
    edit(other / "tokenizer_config.json", eos_token="<unk>")
    for name in ("config.json", "generation_config.json"):
        edit(other / name, eos_token_id=[3, 2])
    assert json.loads((other / "config.json").read_text())["eos_token_id"] == [3, 2]
    found, expected = rewards(tmp_path / "run", other), rewards(tmp_path / "expected", QUICKSTART)
    print(found, expected)
    assert found == expected
    assert any(reward > 0 for reward, _ in expected)
