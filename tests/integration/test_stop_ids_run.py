"""Whole runs of models that end with another id than the tokenizer's eos, as GLM's do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import ROOT, SYNCHRONOUS, checked_ledger, curve, same_curve, train_locally
from tests.helpers.stop_families import edit

pytestmark = [pytest.mark.integration, pytest.mark.slow]

QUICKSTART = ROOT / "configs" / "models" / "quickstart-moe"


def steps_of(run: Path, folder: Path) -> list[dict[str, Any]]:
    train_locally(run, *SYNCHRONOUS, f"model.path={folder}")
    checked_ledger(run)
    return curve(run)


def test_rewards_do_not_depend_on_the_tokenizers_eos_token(tmp_path: Path) -> None:
    other_model = tmp_path / "other"
    shutil.copytree(QUICKSTART, other_model)
    edit(other_model / "tokenizer_config.json", eos_token="<unk>")
    for name in ("config.json", "generation_config.json"):
        edit(other_model / name, eos_token_id=[3, 2])
    steps, expected = steps_of(tmp_path / "run", other_model), steps_of(tmp_path / "expected", QUICKSTART)
    print(steps, expected)
    assert any(step["reward"] > 0 for step in expected)
    assert same_curve(steps, expected)
