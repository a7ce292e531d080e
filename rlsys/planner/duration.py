"""Duration of a run: measured on its earlier steps, or estimated from config.json and an assumed GPU. Pure.

The estimate assumes that every response has the maximum length, and ignores overlap: it gives the order of
magnitude, to choose a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.flops import forward_flops
from rlsys.core.machines import TRAIN_EFFICIENCY, machines
from rlsys.planner.memory import budget, model_size, value_bytes
from rlsys.planner.weight_update_cost import GB, hashing, push_rounds, rate

RECENT = 10


def format_duration(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def measured_duration(seconds: Sequence[float], steps_left: int) -> str | None:
    """Describe the duration from the run's recent steps; None before the first."""
    if not seconds:
        return None
    step_seconds = median(seconds[-RECENT:])
    rest_time = format_duration(step_seconds * steps_left)
    return (
        f"steps take {format_duration(step_seconds)} each; the remaining {steps_left} take about {rest_time}"
    )


def estimated_duration(config: Config, hf: HFConfig) -> str:
    """Describe the estimated seconds of a step's parts and of the whole run, on H100s."""
    if not config.launch.gpus_per_node:
        return "not estimated without GPUs; shown after the first steps"
    r, size = config.rollout, model_size(hf)
    passes = 3 + ("layer" in config.trainer.recompute)
    gpu = machines()["h100"]
    flops = config.samples_per_step * passes * config.algo.epochs * forward_flops(hf, r.max_response_tokens)
    train = flops / (config.parallel.world_size * TRAIN_EFFICIENCY * gpu.tflops[config.model.dtype] * 1e12)
    waves = -(-config.samples_per_step // (config.engine.count * config.max_running_requests))
    generate = waves * r.max_response_tokens * budget(config, size).engine_weights / (gpu.bandwidth * 1e12)
    pushed = value_bytes(config) * size.total
    push = push_rounds(config) * (pushed / GB / rate(config) + hashing(config, pushed)[1])
    overlaps = config.launch.placement == "disaggregated" and r.max_staleness > 0
    step = max(train, generate) + push if overlaps else train + generate + push
    return (
        f"about {format_duration(step)} a step, {format_duration(step * config.trainer.steps)} in all: "
        f"generation {format_duration(generate)}, "
        f"training {format_duration(train)}, push {format_duration(push)} (H100s at {TRAIN_EFFICIENCY:.0%} of "
        "their peak, every response "
        f"at its longest, {r.max_response_tokens} tokens; evaluations and checkpoints not counted)"
    )
