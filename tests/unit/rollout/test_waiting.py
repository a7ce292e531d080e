"""Who waits for groups says what happens meanwhile."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import pytest

from rlsys.config import Config
from rlsys.core.types import GroupState
from rlsys.rollout import progress_watch

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"


async def test_groups_filtered_during_a_wait_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of minutes in which each group's rewards are equal is not silent."""
    monkeypatch.setattr(progress_watch, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(progress_watch, "LOG_SECONDS", 0.0, raising=False)
    config = Config.model_validate({"model": {"path": MODEL}})
    counts = {GroupState.FILTERED: 3}
    buffer = mock.Mock(counts=counts, active=list, ready=list)
    router = mock.Mock(stats=lambda: {"engines_serving": 1, "received_tokens": 0}, engine_states=dict)
    runner = mock.Mock(overdue=list, settled=0)
    runner.wake.wait = mock.AsyncMock()
    looks = []

    def called_away() -> bool:
        looks.append(1)
        counts[GroupState.FILTERED] = 3 + 640
        return len(looks) > 5

    selection = mock.Mock(groups=lambda _: None)
    wait = progress_watch.ProgressWatch(
        config, buffer, router, runner, selection, called_away, mock.AsyncMock()
    )
    with caplog.at_level(logging.WARNING):
        await wait.wait_for_groups(0)
    assert "640 filtered" in wait.missing()
    assert "step 1: algo.planners filtered 640 groups" in caplog.text
