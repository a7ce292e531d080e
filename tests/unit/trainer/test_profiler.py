"""run.profile: traces of chosen train steps of chosen ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.trainer import profiler as profiler_module
from rlsys.trainer.profiler import StepProfiler

pytestmark = pytest.mark.gate
QUICKSTART = Path(__file__).resolve().parents[3] / "configs/quickstart.yaml"


def profiler(run: Path, rank: int, *overrides: str) -> StepProfiler:
    return StepProfiler(load_config(QUICKSTART, [f"run.dir={run}", *overrides]), rank)


def files(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "profiles").glob("*"))


def multiply(which: StepProfiler, steps: int) -> None:
    for step in range(1, steps + 1):
        with which.record(step):
            torch.ones(4, 4) @ torch.ones(4, 4)


def test_the_chosen_steps_of_the_chosen_ranks_are_recorded(tmp_path: Path) -> None:
    chosen = "run.profile={steps: [2, 4], ranks: [0, 2]}"
    for rank in range(4):
        multiply(profiler(tmp_path, rank, "parallel.dp=4", chosen), 3)
    assert files(tmp_path) == ["step-000002-rank-0.json.gz", "step-000002-rank-2.json.gz"]
    with gzip.open(tmp_path / "profiles" / files(tmp_path)[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 1


def test_nothing_is_recorded_without_the_profile_section(tmp_path: Path) -> None:
    multiply(profiler(tmp_path, 0), 2)
    assert files(tmp_path) == []


def test_a_step_that_fails_leaves_no_file(tmp_path: Path) -> None:
    step_profiler = profiler(tmp_path, 0, "run.profile={steps: [1]}")
    with pytest.raises(KeyError), step_profiler.record(1):
        raise KeyError
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ("{steps: [1], ranks: [0, 1]}", "run.profile.ranks = 1: expected a trainer rank below 1"),
        ("{steps: [31, 3]}", "run.profile.steps = 31: expected at most trainer.steps = 30"),
        ("{steps: []}", "run.profile.steps"),
        ("{steps: [0]}", "run.profile.steps"),
    ],
)
def test_a_section_that_records_nothing_is_refused(section: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=error):
        profiler(tmp_path, 0, f"run.profile={section}")


def test_a_gpus_kernels_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[set[ProfilerActivity]] = []

    def profile(*, activities: list[ProfilerActivity]) -> Any:
        recorded.append(set(activities))
        return torch.profiler.profile(activities=[ProfilerActivity.CPU])

    monkeypatch.setattr(profiler_module, "profile", profile)
    for has_cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        multiply(profiler(tmp_path, 0, "run.profile={steps: [1]}"), 1)
    assert recorded == [{ProfilerActivity.CPU}, {ProfilerActivity.CPU, ProfilerActivity.CUDA}]
