"""How long a run takes: what earlier steps of it took, or an estimate from config.json and an assumed GPU. Pure.

The estimate takes every response at its longest, and leaves out what overlaps: it is for choosing a layout, and it
tells the order of magnitude.
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


def clock(seconds: float) -> str:
    """In the unit that a person would use."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def measured(seconds: Sequence[float], steps_left: int) -> str | None:
    """From the steps that the run has made."""
    if not seconds:
        return None
    each = median(seconds[-RECENT:])
    return f"a step took {clock(each)} of late; the {steps_left} that are left take about {clock(each * steps_left)}"


def estimated(config: Config, hf: HFConfig) -> str:
    """Seconds of one step's parts and of the whole run, on H100s; without GPUs nobody can say."""
    if not config.launch.gpus_per_node:
        return "not estimated without GPUs; the display tells it after the first steps"
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
        f"about {clock(step)} a step, {clock(step * config.trainer.steps)} in all: generation {clock(generate)}, "
        f"training {clock(train)}, push {clock(push)} (H100s at {TRAIN_EFFICIENCY:.0%} of their peak, every response "
        f"at its longest, {r.max_response_tokens} tokens; evaluations and checkpoints not counted)"
    )
