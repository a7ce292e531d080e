"""Duration of a run, from its earlier steps or from the planner's forecast of a step, as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rlsys.config import Config
from rlsys.core.machines import TRAIN_EFFICIENCY
from rlsys.planner.capacity import StepForecast

RECENT = 10
"""Number of last train steps whose median is the duration of a step."""
NO_ESTIMATE = "not estimated without GPUs; shown after the first steps"


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit, from seconds to days, of which it has at least two."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def measured_duration(seconds: Sequence[float], steps_left: int) -> str | None:
    """Describe the remaining duration of a run; None before its first train step.

    Args:
        seconds: duration of each train step so far.
        steps_left: number of remaining train steps.
    """
    if not seconds:
        return None
    step_seconds = median(seconds[-RECENT:])
    rest_time = format_duration(step_seconds * steps_left)
    return (
        f"steps take {format_duration(step_seconds)} each; the remaining {steps_left} take about {rest_time}"
    )


def describe_forecast(config: Config, forecast: StepForecast) -> str:
    """Describe the forecast duration of a step, of its parts and of the whole run."""
    waves = f" in {forecast.waves:.2g} waves of {forecast.running} an engine" if forecast.waves > 1 else ""
    training = forecast.demand.busy - forecast.push
    return (
        f"about {format_duration(forecast.step)} a step, "
        f"{format_duration(forecast.step * config.trainer.steps)} in all: "
        f"generation {format_duration(forecast.generation)}{waves}, "
        f"training {format_duration(training)}, push {format_duration(forecast.push)} (H100s at "
        f"{TRAIN_EFFICIENCY:.0%} of their peak, responses of {forecast.lengths.mean:.0f} tokens on average and up to "
        f"{config.rollout.max_response_tokens}; evaluations and checkpoints not counted)"
    )
