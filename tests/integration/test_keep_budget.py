"""Keys and values that stay over a push, on the real stack: none with a budget of nothing, and what is kept otherwise
follows what the trainer measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.sessions import Session, check_ledger

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 8
KEEPING = (
    "launch.placement=colocated", "router.interruption=in_place", "rollout.over_provision=3",
    "rollout.max_staleness=8", f"trainer.steps={STEPS}", "trainer.lr=3e-3",
)  # fmt: skip
"""At such a rate old keys and values are far from new ones."""


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    started_sessions: list[Session] = []
    yield started_sessions
    for session in started_sessions:
        session.kill()


def steps_with(budget: float, sessions: list[Session], folder: Path) -> list[dict[str, Any]]:
    sessions.append(Session(folder, *KEEPING, f"rollout.keep_budget={budget}"))
    code, output = sessions[-1].end()
    assert code == 0, output
    check_ledger(folder)
    return read_metrics(folder).steps


def test_the_kept_share_follows_the_measured_mismatch(sessions: list[Session], tmp_path: Path) -> None:
    none = steps_with(0.0, sessions, tmp_path / "none")
    assert all(step["kept_samples"] == 0 for step in none[1:])
    assert max(step.get("mismatch_kept_mean", 0.0) for step in none) <= 1e-6
    assert sum(step["resumed_samples"] for step in none) > 0

    generous = steps_with(1e3, sessions, tmp_path / "generous")
    assert sum(step["kept_samples"] for step in generous[1:]) > 0
    cost = max(step.get("mismatch_kept_mean", 0.0) for step in generous)
    assert cost > 1e-5
    shares = [step["keep_share"] for step in generous[1:]]
    assert shares == sorted(shares) and shares[-1] > shares[0]

    tight = steps_with(cost / 20, sessions, tmp_path / "tight")
    for previous_step, next_step in pairwise(tight[1:]):
        # The share at the push after a step is in the metrics of the step that follows.
        if previous_step.get("mismatch_kept_mean", 0.0) > cost / 20:
            assert next_step["keep_share"] < previous_step["keep_share"]
    print([(s.get("keep_share"), s.get("kept_samples"), s.get("mismatch_kept_mean")) for s in tight])
    assert min(step["keep_share"] for step in tight[1:]) < shares[-1]
