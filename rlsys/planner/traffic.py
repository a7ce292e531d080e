"""Estimates of the data that rollout processes and trainer ranks receive, store and read."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import layer_stages
from rlsys.core.machines import machines
from rlsys.planner.costs import estimate_costs
from rlsys.planner.memory import Fact, engine_samples, model_size

CORE_TOKENS = 400_000
"""Tokens per second that one core can receive (bench/scale.py, docs/performance.md)."""
MAX_LOAD = 0.7
"""Largest load of a core without delays of its event loop."""
TOKEN_BYTES = 12
"""Bytes on disk of a token with its log-prob."""
ROUTE_BYTES = 1
"""Bytes on disk of a selected expert, with at most 256 experts per layer."""
ANSWER_BYTES = 528
"""Bytes of a sample in the response of `take` (bench/share.py)."""
PLAN_SECONDS = 20e-6
"""CPU time of the trainer to plan a sample (bench/share.py)."""
READ_SECONDS = 0.12e-6
"""CPU time of a rank to read and pack a token (bench/share.py)."""
MEMORY_FACTOR = 1.6
"""Memory of a rank's data relative to the data's size on disk (bench/share.py)."""
ROW_SECONDS = 50e-6
"""CPU time of the rollout process to park a sample (bench/scale.py)."""


def tokens_per_second(config: Config, hf: HFConfig) -> float | None:
    """Return the largest number of tokens per second of all engines on H100s; None without GPUs.

    Engines have this rate if all their samples in flight decode with short contexts.
    """
    if not config.launch.gpus_per_node:
        return None
    running = engine_samples(config)
    seconds = estimate_costs(config, hf, machines()["h100"]).decode(running, 0)
    return config.engine.writers * running / seconds


def workers_needed(config: Config, hf: HFConfig) -> int:
    """Return the number of rollout processes that keeps every core below MAX_LOAD."""
    rate = tokens_per_second(config, hf)
    return 1 if rate is None else max(1, math.ceil(rate / (MAX_LOAD * CORE_TOKENS)))


def describe_traffic(config: Config, hf: HFConfig) -> tuple[list[Fact], list[str]]:
    """Return facts and warnings for `rlsys explain`; none without GPUs."""
    rate = tokens_per_second(config, hf)
    if rate is None:
        return [], []
    workers, needed_workers = config.rollout.workers, workers_needed(config, hf)
    size = model_size(hf)
    routes = sum(size.moe_layers) * hf.experts_per_token * ROUTE_BYTES if config.engine.return_routes else 0
    share = rate / workers / CORE_TOKENS
    fact = (
        "rollout",
        f"at most {rate:,.0f} tokens/s from the engines: {share:.0%} of a core in each of {workers} rollout "
        f"process(es), {rate * (TOKEN_BYTES + routes) / 1e6:,.0f} MB/s to the run's folder",
    )
    warnings = []
    if needed_workers > workers:
        warnings.append(
            f"rollout.workers = {workers} can receive about {workers * CORE_TOKENS:,} tokens/s, and engines may "
            f"generate {rate:,.0f}; expected rollout.workers = {min(needed_workers, config.engine.count)}"
        )
    return [fact, *describe_step_data(config, hf)], warnings


class StepShare(NamedTuple):
    """Data that a trainer rank reads in a step whose responses all have the largest length.

    Attributes:
        tokens: Number of tokens.
        token_bytes: Bytes of tokens and log-probs.
        route_bytes: Bytes of selected experts.
    """

    tokens: float
    token_bytes: float
    route_bytes: float


def step_share(config: Config, hf: HFConfig) -> StepShare:
    """Return the data of a trainer rank of the pipeline stage with most MoE layers."""
    p, size = config.parallel, model_size(hf)
    tokens = config.samples_per_step * config.rollout.max_response_tokens / p.data_parallel
    stages = layer_stages(size.layers, p.pp, p.vpp)
    replayed = max(sum(size.moe_layers[i] for i in range(size.layers) if stages[i] == s) for s in range(p.pp))
    width = 1 if hf.experts <= 256 else 2
    routes = replayed * hf.experts_per_token * width if config.trainer.replay != "off" else 0
    return StepShare(tokens, TOKEN_BYTES * tokens, routes * tokens)


def describe_step_data(config: Config, hf: HFConfig) -> list[Fact]:
    """Describe the data of a step without weights, and the time that interruptions take, for `rlsys explain`."""
    n, share = config.samples_per_step, step_share(config, hf)
    read = share.token_bytes + share.route_bytes
    ranks_per_node = min(config.parallel.world_size, config.launch.gpus_per_node)
    parked = max(0, config.slots - n)
    facts = [
        (
            "a step's data",
            f"{n * ANSWER_BYTES / 1e6:,.1f} MB from the rollout to the trainer, planned in {n * PLAN_SECONDS:.2g} s; "
            f"a rank reads at most {read / 1e9:.3g} GB ({share.token_bytes / 1e9:.2g} of tokens, "
            f"{share.route_bytes / 1e9:.2g} of routes) in about {share.tokens * READ_SECONDS:.2g} s of a core, and "
            f"holds {MEMORY_FACTOR * read / 1e9:.3g} GB: {MEMORY_FACTOR * read * ranks_per_node / 1e9:,.0f} "
            "GB of a node's host memory",
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
