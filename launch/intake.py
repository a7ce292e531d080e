"""What the rollout processes of a run must take in, and whether they can. Pure: estimates for choosing a layout."""

from __future__ import annotations

import math

from launch.memory import Fact, budget, model_size
from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.machines import machines

CORE_TOKENS = 400_000
"""Tokens a second that one core takes in (bench/scale.py, docs/performance.md)."""
FULL = 0.7
"""Share of a core above which its loop answers late."""
PASS_SECONDS = 0.004
"""No pass of an engine is assumed to be shorter: its kernels must be launched."""
TOKEN_BYTES, ROUTE_BYTES = 12, 1
"""On disk: a token with its log-prob; an expert of a layer where there are at most 256 of them."""


def tokens_per_second(config: Config, hf: HFConfig) -> float | None:
    """The most that the engines make on H100s: all slots decode, and a pass reads the weights once. None without
    GPUs: nobody can say."""
    if not config.launch.gpus_per_node:
        return None
    at_once = min(config.slots, config.engine.count * config.max_running_requests)
    read = budget(config, model_size(hf)).engine_weights / (machines()["h100"].bandwidth * 1e12)
    return at_once / max(read, PASS_SECONDS)


def workers_wanted(config: Config, hf: HFConfig) -> int:
    """As many as keep every core below FULL."""
    made = tokens_per_second(config, hf)
    return 1 if made is None else max(1, math.ceil(made / (FULL * CORE_TOKENS)))


def describe_intake(config: Config, hf: HFConfig) -> tuple[list[Fact], list[str]]:
    """What `explain` tells, and what it warns of."""
    made = tokens_per_second(config, hf)
    if made is None:
        return [], []
    workers, wanted = config.rollout.workers, workers_wanted(config, hf)
    size = model_size(hf)
    routes = sum(size.moe_layers) * hf.experts_per_token * ROUTE_BYTES if config.engine.return_routes else 0
    share = made / workers / CORE_TOKENS
    fact = (
        "rollout",
        f"at most {made:,.0f} tokens/s from the engines: {share:.0%} of a core in each of {workers} rollout "
        f"process(es), {made * (TOKEN_BYTES + routes) / 1e6:,.0f} MB/s to the run's folder",
    )
    odd = []
    if wanted > workers:
        odd.append(
            f"engines may make {made:,.0f} tokens/s, and rollout.workers = {workers} takes in some "
            f"{workers * CORE_TOKENS:,}: expected rollout.workers = {min(wanted, config.engine.count)}"
        )
    return [fact], odd
