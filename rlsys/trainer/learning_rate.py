"""Learning rates. Pure."""

from __future__ import annotations

import math

from rlsys.config.trainer import Schedule, TrainerConfig


def learning_rate(t: TrainerConfig, step: int, schedule: Schedule, end: float) -> float:
    """Of the 1-based `step`: up to t.lr over the warm-up steps, then by `schedule`, down to `end` of it at t.steps.

    The first step after the warm-up has the full rate.
    """
    if step <= t.warmup_steps:
        return t.lr * (step / t.warmup_steps)
    if schedule == "constant":
        return t.lr
    done = min(1.0, (step - 1 - t.warmup_steps) / max(1, t.steps - t.warmup_steps))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return t.lr * (end + (1 - end) * left)
