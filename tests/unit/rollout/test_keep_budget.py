"""Which samples keep their keys and values over a push, and how that follows what it was measured to cost."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlsys.config import Config
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample
from rlsys.rollout.keep_budget import FIRST_SHARE, KeepBudget, next_share


class Notes:
    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    def note(self, name: str) -> str | None:
        return self.held.get(name)

    def set_note(self, name: str, value: str) -> None:
        self.held[name] = value


def config(budget: float | None, interruption: str = "in_place", **weights: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"}, "run": {"dir": "r"}, "router": {"interruption": interruption},
            "rollout": {"keep_budget": budget}, "launch": {"placement": "disaggregated"}, "weights": weights,
        }
    )  # fmt: skip


def sample(number: int, tokens: int) -> Sample:
    spans = [VersionSpan(1, 0, tokens)] if tokens else []
    return Sample(number, 0, number, [1], seed=0, spans=spans)


IN_FLIGHT = [sample(i, tokens) for i, tokens in enumerate([5, 0, 40, 7, 40, 1, 9, 30])]


def kept(budget: KeepBudget) -> list[int]:
    chosen = budget.choose(IN_FLIGHT)
    return [s.sample_id for s in IN_FLIGHT if chosen(s)]


def test_the_share_by_hand() -> None:
    assert next_share(0.4, 0.01, 0.02) == pytest.approx(0.2)
    assert next_share(0.4, 0.01, 1.0) == pytest.approx(0.1), "no more than to a quarter at once"
    assert next_share(0.4, 0.01, 0.005) == pytest.approx(0.5)
    assert next_share(0.9, 0.01, 0.0) == 1.0
    assert next_share(0.0, 0.01, 0.0) == 0.05
    assert next_share(0.4, 0.0, 0.001) == 0.0


def test_the_longest_samples_are_kept_first() -> None:
    budget = KeepBudget(config(0.01), Notes())  # type: ignore[arg-type]
    assert FIRST_SHARE == 0.25
    assert kept(budget) == [2, 4]
    assert budget.metrics == {"keep_share": 0.25, "kept_samples": 2, "kept_response_tokens": 80}
    budget.steer(0.005)
    budget.steer(0.005)
    assert kept(budget) == [2, 4, 7]  # 0.25 * 1.25 ** 2 of eight
    budget.steer(1.0)
    assert kept(budget) == []


def test_a_zero_budget_keeps_no_samples_and_no_budget_keeps_all() -> None:
    strict, open_ended = (KeepBudget(config(b), Notes()) for b in (0.0, None))  # type: ignore[arg-type]
    for budget in (strict, open_ended):
        budget.steer(0.0)
    assert kept(strict) == []
    assert kept(open_ended) == [s.sample_id for s in IN_FLIGHT]
    assert open_ended.metrics == {}


def test_the_share_is_unchanged_without_a_measurement_and_survives_a_restart() -> None:
    notes = Notes()
    budget = KeepBudget(config(0.01), notes)  # type: ignore[arg-type]
    budget.steer(None)
    assert not notes.held
    budget.steer(0.002)
    again = KeepBudget(config(0.01), notes)  # type: ignore[arg-type]
    again.choose(IN_FLIGHT)
    assert again.metrics["keep_share"] == pytest.approx(0.3125)


def test_keep_budget_requires_in_place_interruption() -> None:
    for interruption in ("abort", "retract"):
        with pytest.raises(
            ValidationError,
            match=rf"rollout.keep_budget = 0\.01.*{interruption}.*router.interruption = in_place",
        ):
            config(0.01, interruption)
    with pytest.raises(ValidationError, match=r"weights\.rolling = 1 pauses engines"):
        config(0.01, rolling=1, method="broadcast")
