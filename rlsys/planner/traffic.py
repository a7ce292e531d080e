"""What the rollout processes of a run must take in, and whether they can. Pure: estimates for choosing a layout."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import layer_stages
from rlsys.core.machines import machines
from rlsys.planner.memory import Fact, budget, model_size

CORE_TOKENS = 400_000
"""Tokens a second that one core takes in (bench/scale.py, docs/performance.md)."""
FULL = 0.7
"""Share of a core above which its loop answers late."""
PASS_SECONDS = 0.004
"""No pass of an engine is assumed to be shorter: its kernels must be launched."""
TOKEN_BYTES, ROUTE_BYTES = 12, 1
"""On disk: a token with its log-prob; an expert of a layer where there are at most 256 of them."""
ANSWER_BYTES = 528
"""Of a sample in the answer of `take` (bench/share.py)."""
PLAN_SECONDS, READ_SECONDS, HELD = 20e-6, 0.12e-6, 1.6
"""Of the processor, to plan a sample and to read and pack a token of the share; memory that takes, over the share
(bench/share.py)."""
ROW_SECONDS = 50e-6
"""Of the rollout process, for a sample that it parks (bench/scale.py)."""


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
    return [fact, *describe_step_data(config, hf)], odd


class StepShare(NamedTuple):
    """What one trainer rank reads of a step whose responses are all at their longest; bytes."""

    tokens: float
    token_bytes: float
    route_bytes: float


def step_share(config: Config, hf: HFConfig) -> StepShare:
    """Of a rank of the pipeline stage with most layers that have experts."""
    p, size = config.parallel, model_size(hf)
    tokens = config.samples_per_step * config.rollout.max_response_tokens / p.data_parallel
    stages = layer_stages(size.layers, p.pp, p.vpp)
    replayed = max(sum(size.moe_layers[i] for i in range(size.layers) if stages[i] == s) for s in range(p.pp))
    width = 1 if hf.experts <= 256 else 2
    routes = replayed * hf.experts_per_token * width if config.trainer.replay != "off" else 0
    return StepShare(tokens, TOKEN_BYTES * tokens, routes * tokens)


def describe_step_data(config: Config, hf: HFConfig) -> list[Fact]:
    """What a step moves beside the weights, and what an interrupt costs."""
    n, share = config.samples_per_step, step_share(config, hf)
    read = share.token_bytes + share.route_bytes
    here = min(config.parallel.world_size, config.launch.gpus_per_node)
    parked = max(0, config.slots - n)
    facts = [
        (
            "a step's data",
            f"{n * ANSWER_BYTES / 1e6:,.1f} MB from the rollout to the trainer, planned in {n * PLAN_SECONDS:.2g} s; "
            f"a rank reads at most {read / 1e9:.3g} GB ({share.token_bytes / 1e9:.2g} of tokens, "
            f"{share.route_bytes / 1e9:.2g} of routes) in about {share.tokens * READ_SECONDS:.2g} s of a core, and "
            f"holds {HELD * read / 1e9:.3g} GB: {HELD * read * here / 1e9:,.0f} GB of a node's host memory",
        )
    ]
    if parked:
        facts.append(
            (
                "an interrupt",
                f"{parked} samples are parked at each step: {parked * ROW_SECONDS:.2g} s of the rollout",
            )
        )
    return facts
