"""Cost of a weight update, from config.json and the layout: bytes of senders and receivers, and seconds."""

from __future__ import annotations

from rlsys.config import Config
from rlsys.config.weight_methods import WEIGHT_METHODS
from rlsys.convert.config import HFConfig
from rlsys.planner.layout import on_cuda
from rlsys.weights.shard_plan import SendersPlan, plan_senders

GB = 1e9
HASH_RATES = {True: 1000.0, False: 1.0}
"""Assumed GB/s of hashing. With CUDA, by rlsys/ops/tensor_digest.py: its 28 integer instructions per word allow
twice as much on an H100; not measured yet. Without, by SHA-256 on one core."""
LINK = 50.0
"""GB/s of one 400 Gb/s port; H100 hosts have one per GPU (NVIDIA's data sheet of the DGX H100)."""


def sender_plan(config: Config, hf: HFConfig) -> SendersPlan:
    """Return the senders with weights.method = sharded."""
    return plan_senders(config, hf, experts_together=not on_cuda(config))


def describe_push(config: Config, hf: HFConfig, size: float) -> list[tuple[str, str]]:
    """Describe a weight update, for `explain`. `size`: bytes of the model as it is sent."""
    method = config.weights.method
    of_link = " a link" if method == "sharded" else ""
    takes = f"{short(size / GB / rate(config), 2)} s at {_assumed_rate(config):g} GB/s{of_link}"
    transport = ("memory" if _by_memory(config) else "broadcast") if method == "auto" else method
    facts = [("a weight push", f"{_gb(size)} GB to each engine, about {takes} ({transport})")]
    if (at_once := config.weights.rolling) is not None:
        rounds, go_on = push_rounds(config), config.engine.count - at_once
        description = (
            f"{rounds}, of {at_once} engines each, while {go_on} or more continue; the trainer sends "
        )
        description += "once per round"
        facts.append(("its rounds", description))
    share, seconds_of_share = hashing(config, size)
    if share:
        description = f"{_gb(share)} GB per trainer rank, about {short(seconds_of_share, 2)} s"
        facts.append(("its hashes", description))
    if method == "sharded":
        plan = sender_plan(config, hf)
        facts.append(("its senders", describe_senders(plan, config)))
    return facts


def hashing(config: Config, size: float) -> tuple[float, float]:
    """Return the bytes that a trainer rank hashes in a push of `size` bytes, and the seconds.

    Hashing is distributed over all ranks, about evenly (rlsys/convert/hash_shares.py); senders of a sharded
    push hash what they send.
    """
    if config.weights.method == "adapter":
        return 0.0, 0.0  # the base model below the adapters is hashed once
    rank_bytes = size / config.parallel.world_size * len(config.engine.tps)
    return rank_bytes, rank_bytes / GB / HASH_RATES[on_cuda(config)]


def rate(config: Config) -> float:
    """Return the GB/s to one engine; with a sharded push, over the links of all of its ranks."""
    links = min(config.engine.tps) if config.weights.method == "sharded" else 1
    return _assumed_rate(config) * links


def _assumed_rate(config: Config) -> float:
    """Return the assumed GB/s of one link: broadcast's for a custom transport, and for auto with a process group."""
    method = config.weights.method
    if method not in WEIGHT_METHODS or (method == "auto" and not _by_memory(config)):
        method = "broadcast"
    return WEIGHT_METHODS[method].rate


def _by_memory(config: Config) -> bool:
    """Return whether all engines open memory of trainer ranks with weights.method = auto."""
    return config.launch.placement == "colocated" if on_cuda(config) else config.launch.nodes == 1


def push_rounds(config: Config) -> int:
    """Return the number of times that the trainer sends the model in a push."""
    at_once = config.weights.rolling
    return 1 if at_once is None else -(-config.engine.count // at_once)


def describe_senders(plan: SendersPlan, config: Config) -> str:
    """Describe the senders of a sharded push, for `explain`."""
    of_link = plan.received_bytes / min(config.engine.tps)
    return (
        f"{len(plan.schedules)} of {len(plan.total_bytes)} trainer ranks; a rank sends {_gb(plan.mean)} GB on "
        f"average, at most {_gb(max(plan.total_bytes))} GB, with data for engines counted once; an engine rank's "
        f"link receives {_gb(of_link)} GB: {short(seconds(plan, config), 2)} s or more at {LINK:g} GB/s a link"
    )


def seconds(plan: SendersPlan, config: Config) -> float:
    """Return the minimum seconds of a sharded push.

    A sender's link carries its tensors once per engine, and the shards for other senders; an engine's links
    share the model.
    """
    engines = config.engine.count
    leaves = max(
        to_engine * engines + to_senders
        for to_engine, to_senders in zip(plan.engine_bytes, plan.gather_bytes, strict=True)
    )
    return max(plan.received_bytes / min(config.engine.tps), leaves) / GB / LINK


def _gb(size: float) -> str:
    return short(size / GB)


def short(value: float, digits: int = 3) -> str:
    """Format a number without an exponent."""
    return f"{value:.{digits}g}" if value < 100 else f"{value:,.0f}"
