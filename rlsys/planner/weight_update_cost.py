"""Cost of a weight update: bytes of senders and receivers, and seconds, from config.json and the layout."""

from __future__ import annotations

from rlsys.config import Config
from rlsys.config.weight_methods import WEIGHT_METHODS
from rlsys.convert.config import HFConfig
from rlsys.planner.layout import on_cuda
from rlsys.weights.shard_plan import SendersPlan, plan_senders

GB = 1e9
HASH_RATES = {True: 1000.0, False: 1.0}
"""Assumed GB/s of hashing with CUDA (True) and without (False). With CUDA, rlsys/ops/tensor_digest.py hashes; its 28
integer instructions per word allow twice this rate on an H100, which was not measured. Without CUDA, SHA-256 on one
core hashes."""
LINK = 50.0
"""GB/s of a 400 Gb/s port. H100 hosts have one port per GPU (NVIDIA's data sheet of the DGX H100)."""


def sender_plan(config: Config, hf: HFConfig) -> SendersPlan:
    """Return the plan of the senders for weights.method = sharded."""
    return plan_senders(config, hf, experts_together=not on_cuda(config))


def describe_push(config: Config, hf: HFConfig, size: float) -> list[tuple[str, str]]:
    """Describe a weight update for `rlsys explain`.

    Args:
        config: config of the run.
        hf: the model.
        size: bytes that each engine receives.
    """
    method = config.weights.method
    per_link = " per link" if method == "sharded" else ""
    duration = f"{short(size / GB / rate(config), 2)} s at {_assumed_rate(config):g} GB/s{per_link}"
    transport = ("memory" if _by_memory(config) else "broadcast") if method == "auto" else method
    facts = [("a weight push", f"{_gb(size)} GB to each engine, about {duration} ({transport})")]
    if (round_size := config.weights.rolling) is not None:
        description = (
            f"{push_rounds(config)}, of {round_size} engines each, while {config.engine.count - round_size} or more "
            "continue; the trainer sends once per round"
        )
        facts.append(("its rounds", description))
    hashed_bytes, hash_seconds = hashing(config, size)
    if hashed_bytes:
        description = f"{_gb(hashed_bytes)} GB per trainer rank, about {short(hash_seconds, 2)} s"
        facts.append(("its hashes", description))
    if method == "sharded":
        plan = sender_plan(config, hf)
        facts.append(("its senders", describe_senders(plan, config)))
    return facts


def hashing(config: Config, size: float) -> tuple[float, float]:
    """Return the bytes that a trainer rank hashes in a push of `size` bytes, and the seconds that it takes.

    All ranks hash about equal shares (rlsys/convert/hash_shares.py). Senders of a sharded push hash the tensors that
    they send.
    """
    if config.weights.method == "adapter":
        return 0.0, 0.0  # the base model is hashed once, not in each push
    rank_bytes = size / config.parallel.world_size * len(config.engine.tps)
    return rank_bytes, rank_bytes / GB / HASH_RATES[on_cuda(config)]


def rate(config: Config) -> float:
    """Return the assumed GB/s to an engine. With a sharded push, these are over the links of all its ranks."""
    links = min(config.engine.tps) if config.weights.method == "sharded" else 1
    return _assumed_rate(config) * links


def _assumed_rate(config: Config) -> float:
    """Return the assumed GB/s of a link. A custom transport, and `auto` without shared memory, count as broadcast."""
    method = config.weights.method
    if method not in WEIGHT_METHODS or (method == "auto" and not _by_memory(config)):
        method = "broadcast"
    return WEIGHT_METHODS[method].rate


def _by_memory(config: Config) -> bool:
    """Return whether engines read weights from memory of trainer ranks with weights.method = auto."""
    return config.launch.placement == "colocated" if on_cuda(config) else config.launch.nodes == 1


def push_rounds(config: Config) -> int:
    """Return the number of times that the trainer sends the model in a push."""
    round_size = config.weights.rolling
    return 1 if round_size is None else -(-config.engine.count // round_size)


def describe_senders(plan: SendersPlan, config: Config) -> str:
    """Describe the senders of a sharded push for `rlsys explain`."""
    link_bytes = plan.received_bytes / min(config.engine.tps)
    return (
        f"{len(plan.schedules)} of {len(plan.total_bytes)} trainer ranks; a rank sends {_gb(plan.mean)} GB on "
        f"average, at most {_gb(max(plan.total_bytes))} GB, with data for engines counted once; an engine rank's "
        f"link receives {_gb(link_bytes)} GB: {short(seconds(plan, config), 2)} s or more at {LINK:g} GB/s per link"
    )


def seconds(plan: SendersPlan, config: Config) -> float:
    """Return the smallest possible duration of a sharded push in seconds.

    The link of a sender carries its tensors once for each engine, and its shards for other senders. Each link of an
    engine carries an equal share of the model.
    """
    engines = config.engine.count
    sent_bytes = max(
        to_engine * engines + to_senders
        for to_engine, to_senders in zip(plan.engine_bytes, plan.gather_bytes, strict=True)
    )
    return max(plan.received_bytes / min(config.engine.tps), sent_bytes) / GB / LINK


def _gb(size: float) -> str:
    """Format a number of bytes in GB."""
    return short(size / GB)


def short(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, and without an exponent."""
    return f"{value:.{digits}g}" if value < 100 else f"{value:,.0f}"
