"""`rlsys algo check`: what it finds in plug-ins of somebody's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.algo.contract import check_promises, kind_of
from rlsys.cli.main import main
from rlsys.config import load_config
from rlsys.core.errors import UserError
from tests.helpers.runs import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
MODULE = '''
import torch
from rlsys.algo.losses import Loss
from rlsys.algo.corrections import CorrectionPlugin

def plain(view, update_stats):
    """-r A."""
    return -view.ratio * view.advantages, {}

def noisy(view, update_stats):
    return -view.ratio * view.advantages * torch.rand(()), {}

def of_its_piece(view, update_stats):
    return -view.ratio * view.advantages / view.ratio.detach().mean(), {}

def infinite(view, update_stats):
    return -view.ratio / (view.advantages - view.advantages), {}

class Named(Loss):
    """-r A."""

    def __call__(self, view, update_stats):
        return -view.ratio * view.advantages, {}
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path / "mine.py"


def lines(name: str, kind: str = "loss", *overrides: str) -> list[str]:
    return list(check_promises(load_config(QUICKSTART, overrides), kind, name))


def test_a_loss_that_keeps_its_promises(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algo", "check", f"{module}:plain", "--kind", "loss", "--config", str(QUICKSTART)]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["ok  "] * 4


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("noisy", "expected no random numbers"),
        ("of_its_piece", "another result if an update is cut into 2 micro-batches"),
        ("infinite", "its gradient is not finite"),
        ("missing", "has no class or function 'missing'"),
    ],
)
def test_a_promise_that_is_broken_is_one_line(name: str, told: str, module: Path) -> None:
    with pytest.raises(UserError, match=told):
        lines(f"{module}:{name}")


def test_the_kind_is_inferred_for_a_class_but_not_for_a_function(module: Path) -> None:
    assert kind_of(f"{module}:Named") == "loss"
    assert kind_of("tis") == "correction"
    with pytest.raises(UserError, match="set its kind with --kind"):
        kind_of(f"{module}:plain")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["tis", "--kind", "corection"],
            "--kind corection: unknown kind of plug-in; did you mean correction?",
        ),
        (
            ["tis", "--kind", "xyz"],
            "--kind xyz: unknown kind of plug-in; known: prompt, planner, group_reward",
        ),
        (["tis", "--kind", ""], "--kind : unknown kind of plug-in; known:"),
        (["vcpo"], "vcpo is the name of several plug-ins: select one with --kind, one of advantage, hook"),
        (["lens"], "select one with --kind, one of planner, selector, correction"),
    ],
)
def test_an_invalid_or_missing_kind_is_a_one_line_error(
    args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: StopIteration, and the first of several kinds without a word."""
    assert main(["algo", "check", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlsys: error: ")
    assert told in line


def test_overrides_make_the_run_around_it(module: Path) -> None:
    with pytest.raises(UserError, match=r"use algo\.anchor = old"):
        lines("tis", "correction")
    assert len(lines("tis", "correction", "algo.anchor=old")) == 4
    with pytest.raises(UserError, match="cap"):
        lines("tis", "correction", "algo.anchor=old", "algo.corrections=[{name: tis, cap: -1}]")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot import .*no such file"):
        lines(f"{tmp_path}/other.py:plain")
