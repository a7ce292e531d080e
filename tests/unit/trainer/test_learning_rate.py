"""Learning rates."""

from __future__ import annotations

import pytest

from rlsys.config.trainer import TrainerConfig
from rlsys.trainer.trainer import learning_rate


def test_the_rate_rises_and_falls() -> None:
    t = TrainerConfig(lr=1.0, warmup_steps=2, steps=12)

    def rates(schedule: str) -> list[float]:
        return [learning_rate(t, step, schedule, 0.2) for step in (1, 2, 3, 8, 12, 13, 20)]  # type: ignore[arg-type]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.6, 0.28, 0.2, 0.2])
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.6, 0.2195774, 0.2, 0.2])


def test_the_rate_rises_from_a_share() -> None:
    t = TrainerConfig(lr=1.0, warmup_steps=2, steps=12, lr_start=0.1)
    assert [learning_rate(t, step, "constant", 0.0) for step in (1, 2, 3)] == pytest.approx([0.55, 1, 1])


def test_the_learning_rate_without_warm_up_or_steps_is_constant() -> None:
    t = TrainerConfig(lr=2.0, warmup_steps=0, steps=0)
    assert learning_rate(t, 1, "constant", 0.0) == 2
    assert learning_rate(t, 1, "linear", 0.5) == 2
