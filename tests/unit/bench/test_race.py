"""What bench/race.py reads from a runner's lines."""

from __future__ import annotations

from typing import Any

from race import read_run


def lines(*rows: tuple[str, float, int, float]) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "time": time, "step": step, "accuracy": accuracy}
        for kind, time, step, accuracy in rows
    ]


def test_evaluations_are_in_no_figure_but_the_wall() -> None:
    log_lines = lines(
        ("run", 10, 0, 0), ("eval", 30, 0, 0.1), ("step", 35, 1, 0), ("eval", 45, 1, 0.2), ("step", 52, 2, 0),
        ("eval", 60, 2, 0.95),
    )  # fmt: skip
    assert read_run(log_lines[:-1], 5.0, 0.9) is None
    result = read_run(log_lines, 5.0, 0.9)
    assert result is not None
    assert (result.steps, result.accuracy) == (2, 0.95)
    assert (result.step_seconds, result.start_seconds, result.wall_seconds) == (5 + 7, 25, 55)
