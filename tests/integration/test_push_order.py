"""The trainer's loop around its neighbours: the order of a push, and what it keeps when it must leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.core.owner import claim
from rlsys.core.weight_updates import WeightUpdate
from rlsys.evaluation.results import EvalResult
from rlsys.train import Loop
from rlsys.trainer import setup
from rlsys.trainer.checkpoints.checkpoint import Checkpoints
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]


class Rollout:
    """Answers the trainer until it leaves, and writes down what it was asked."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def wait_ready(self, timeout: float) -> None: ...
    def restore(self, step: int) -> None: ...
    def take(self, step: int) -> None: ...
    def evaluate(self) -> Any:
        return EvalResult(accuracy=0.0, prompts=0, mean_length=0.0, truncated=0)

    def leaving(self) -> float:
        return 0.0

    def begin_push(self, _mismatch_kept: float | None = None) -> WeightUpdate:
        self._events.append("begin_push: engines wake their weights")
        return WeightUpdate(1, [], [[5, 3, 80, 41]])

    def end_push(self, *_: object) -> dict[str, float]:
        self._events.append("end_push: engines wake their caches")
        return {"time_checksums": 0.0, "push_left": 0}


@pytest.mark.parametrize("release", [True, False])
def test_the_trainers_cache_is_empty_before_an_engine_wakes(
    release: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty_cache"))
    model = cases.write_model(tmp_path / "model")
    config = cases.config_of(model, tmp_path / "run", launch={"release_memory": release})
    config.run.dir.mkdir()
    Loop(config, Rollout(events), claim(config.run.dir)).run()  # type: ignore[arg-type]
    setup.leave_layout()
    pushed = ["begin_push: engines wake their weights", "end_push: engines wake their caches"]
    assert events == (["empty_cache", pushed[0], "empty_cache", pushed[1]] if release else pushed)


class Saver:
    """A trainer of which only the checkpoints count."""

    def __init__(self, save_seconds: float) -> None:
        self.save_seconds = save_seconds
        self.saved: list[int] = []

    def on_main(self, call: Callable[[], Any]) -> Any:
        return call()

    def finish_checkpoint(self, wait: bool) -> None: ...

    def save_checkpoint(self, step: int, *_: object) -> None:
        self.saved.append(step)


@pytest.mark.parametrize(("save_seconds", "saved"), [(None, [16]), (60.0, [16]), (4000.0, [])])
def test_a_session_that_must_leave_keeps_its_work(
    tmp_path: Path, save_seconds: float | None, saved: list[int]
) -> None:
    """None: nobody has measured a save yet. Before: then nothing was kept, and a run that was preempted more often
    than it saved never got on."""
    if save_seconds is None:
        save_seconds = Checkpoints(tmp_path / "checkpoints", 2, None).seconds  # type: ignore[arg-type]
    loop, rollout = Loop.__new__(Loop), Rollout([])
    rollout.leaving = lambda: 3600.0  # type: ignore[method-assign]
    saver = Saver(save_seconds)
    vars(loop).update(
        rollout=rollout,
        trainer=saver,
        on_main=saver.on_main,
        objective=None,
        _write=lambda *_, **__: None,
        step=16,
        saved_step=10,
    )
    loop.leave()
    assert saver.saved == saved
