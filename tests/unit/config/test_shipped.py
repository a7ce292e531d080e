"""Configs and models by name, wherever rlsys stands; the examples."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlsys.cli.preflight import check_start
from rlsys.config import load_config, shipped
from rlsys.core.errors import UserError
from tests.helpers.runs import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_local_config_files_take_precedence_over_shipped_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("quickstart", "configs/quickstart.yaml", "quickstart.yaml"):
        monkeypatch.chdir(tmp_path)
        assert shipped.find_config(Path(name)) == ROOT / "configs" / "quickstart.yaml"
    assert shipped.find_config(Path("algorithms/dapo")).name == "dapo.yaml"
    (tmp_path / "quickstart.yaml").write_text("run: {dir: mine}")
    assert shipped.find_config(Path("quickstart.yaml")) == Path("quickstart.yaml")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("quikstart", "did you mean quickstart"),
        ("algorithms/exact-old.yaml", "did you mean algorithms/exact_old"),
        ("zzz", "no such file"),
    ],
)
def test_a_name_that_is_none_is_one_line(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        shipped.find_config(Path(name))


def test_the_shipped_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("quickstart")).model.path == ROOT / "configs" / "models" / "quickstart-moe"
    (tmp_path / "configs" / "models").mkdir(parents=True)
    shutil.copytree(ROOT / "configs/models/quickstart-moe", tmp_path / "configs/models/quickstart-moe")
    assert load_config(Path("quickstart")).model.path == Path("configs/models/quickstart-moe")


def test_every_example_has_a_config() -> None:
    # The last three: tests/cluster/test_churn.py, tests/integration/test_two_policies.py, unit/bench/test_recipes.py.
    excluded_names = {"README", "__pycache__", "tools", "ray_engines", "relay", "recipes"}
    parts = {p.stem for p in (ROOT / "examples").iterdir()} - excluded_names
    assert {p.stem for p in EXAMPLES} == parts
    assert parts == {
        "own_agent",
        "own_data",
        "own_environment",
        "own_loss",
        "own_planner",
        "own_reward",
        "replayed",
        "second_try",
    }
    for file in (ROOT / "examples").iterdir():
        assert file.is_dir() or len(file.read_text().splitlines()) < 70


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_would_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_start(load_config(path))


def test_names_too_long_for_the_file_system_are_rejected(tmp_path: Path) -> None:
    """Before: an OSError, as the shipped folders are looked through before the field is checked."""
    with pytest.raises(UserError, match=r"model\.path: expected names of at most 255 bytes"):
        load_config(Path("quickstart"), [f"model.path=configs/{'m' * 300}"])
    with pytest.raises(UserError, match="no such file, and no shipped config of this name"):
        load_config(Path("configs") / ("c" * 300))
    (tmp_path / "mine.yaml").write_text(f"base: {'b' * 300}\n")
    with pytest.raises(UserError, match="no such file, and no shipped config of this name"):
        load_config(tmp_path / "mine.yaml")
