"""What may forbid a run is looked at while its engines start, and before anything else does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from launch import supervisor
from launch.plan import Role
from launch.stops import StoppedBySignal
from rlsys.core.errors import UserError
from tests.helpers.supervisor_stage import SERVE_FOREVER, Stage, wait_until


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.02)
    return Stage(tmp_path)


def began(stage: Stage) -> list[str]:
    return [note.split()[0] for note in stage.notes if " began " in note]


def roles(stage: Stage) -> tuple[Role, ...]:
    return (
        stage.role("engine", SERVE_FOREVER, serves=True),
        stage.role("rollout", SERVE_FOREVER, serves=True),
        stage.role("trainer", "wait_for('rollout probed')"),
    )


def test_engines_start_before_the_check_and_the_others_after_it(stage: Stage) -> None:
    early_roles = []

    def check() -> None:
        wait_until(lambda: bool(began(stage)))
        early_roles.extend(began(stage))

    stage.run(*roles(stage), check=check)
    assert early_roles == ["engine-0"]
    assert set(began(stage)) == {"engine-0", "rollout", "trainer"}


def test_a_failed_check_stops_the_engines_before_other_roles_start(stage: Stage) -> None:
    def check() -> None:
        wait_until(lambda: bool(began(stage)))
        raise UserError("algo.loss = nonsense")

    with pytest.raises(UserError, match=r"algo\.loss = nonsense"):
        stage.run(*roles(stage), check=check)
    assert began(stage) == ["engine-0"]
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_check_that_hangs(stage: Stage, number: signal.Signals) -> None:
    def check() -> None:
        wait_until(lambda: bool(began(stage)))
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except Exception:  # noqa: BLE001  (as around a plug-in: the signal must get past it)
            pytest.fail("the signal was taken for a plug-in's error")

    with pytest.raises(StoppedBySignal) as stopped:
        stage.run(*roles(stage), check=check)
    assert stopped.value.number == number
    assert began(stage) == ["engine-0"]
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())
