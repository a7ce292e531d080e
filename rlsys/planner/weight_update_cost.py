"""What a weight push comes to: bytes of senders and receivers, and seconds. From config.json and the layout alone."""

from __future__ import annotations

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.planner.layout import on_cuda
from rlsys.weights.shard_plan import SendersPlan, plan_senders

GB = 1e9
RATES = {"tensor": 20.0, "broadcast": 10.0, "sharded": 10.0, "disk": 1.0, "disk_delta": 1.0, "adapter": 20.0}
"""GB/s assumed of a push: memory of one machine, a fast network, a shared folder (written, then read)."""
HASH_RATES = {True: 1000.0, False: 1.0}
"""GB/s assumed of hashing. With CUDA, of rlsys/ops/tensor_digest.py: its 28 integer instructions a word allow twice
as much on an H100, and no card has run it yet. Without, of SHA-256 on one core."""
LINK = 50.0
"""GB/s of one 400 Gb/s port, of which hosts of H100s have one a GPU (NVIDIA's data sheet of the DGX H100)."""


def senders_of(config: Config, hf: HFConfig) -> SendersPlan:
    """Who sends what with weights.method = sharded."""
    return plan_senders(config, hf, experts_together=not on_cuda(config))


def describe_push(config: Config, hf: HFConfig, size: float) -> list[tuple[str, str]]:
    """`size`: bytes of the model as it is pushed."""
    method = config.weights.method
    of_link = " a link" if method == "sharded" else ""
    takes = f"{short(size / GB / rate(config), 2)} s at {RATES[method]:g} GB/s{of_link}"
    facts = [("a weight push", f"{_gb(size)} GB to each engine, about {takes} ({method})")]
    if (at_once := config.weights.rolling) is not None:
        rounds, go_on = push_rounds(config), config.engine.count - at_once
        told = f"{rounds}, of {at_once} engines each, while {go_on} or more go on; the trainer sends so often"
        facts.append(("its rounds", told))
    share, seconds_of_share = hashing(config, size)
    if share:
        told = f"{_gb(share)} GB by a trainer rank, about {short(seconds_of_share, 2)} s"
        facts.append(("its hashes", told))
    if method == "sharded":
        plan = senders_of(config, hf)
        facts.append(("its senders", describe_senders(plan, config)))
    return facts


def hashing(config: Config, size: float) -> tuple[float, float]:
    """Bytes that a trainer rank hashes of a push of `size` bytes, and seconds. All ranks share hashing, about evenly
    (rlsys/convert/hash_shares.py); senders of a sharded push hash what they send."""
    if config.weights.method == "adapter":
        return 0.0, 0.0  # the model under the adapters is hashed once
    hashed = size / config.parallel.world_size * len(config.engine.tps)
    return hashed, hashed / GB / HASH_RATES[on_cuda(config)]


def rate(config: Config) -> float:
    """GB/s to one engine. Of a sharded push each of its ranks' links takes a part."""
    links = min(config.engine.tps) if config.weights.method == "sharded" else 1
    return RATES[config.weights.method] * links


def push_rounds(config: Config) -> int:
    """How often the trainer sends the model in a push, and each time it takes as long."""
    at_once = config.weights.rolling
    return 1 if at_once is None else -(-config.engine.count // at_once)


def describe_senders(plan: SendersPlan, config: Config) -> str:
    of_link = plan.received_bytes / min(config.engine.tps)
    return (
        f"{len(plan.schedules)} of {len(plan.total_bytes)} trainer ranks; a rank sends {_gb(plan.mean)} GB on "
        f"average, at most {_gb(max(plan.total_bytes))}, what goes to engines counted once; an engine rank's link "
        f"takes {_gb(of_link)}: {short(seconds(plan, config), 2)} s or more at {LINK:g} GB/s a link"
    )


def seconds(plan: SendersPlan, config: Config) -> float:
    """At the least. A sender's link carries its tensors once for each engine, and what it passes on; an engine's
    links share the model."""
    engines = config.engine.count
    leaves = max(
        given * engines + passed for given, passed in zip(plan.engine_bytes, plan.gather_bytes, strict=True)
    )
    return max(plan.received_bytes / min(config.engine.tps), leaves) / GB / LINK


def _gb(size: float) -> str:
    return short(size / GB)


def short(value: float, digits: int = 3) -> str:
    """A figure without an exponent."""
    return f"{value:.{digits}g}" if value < 100 else f"{value:,.0f}"
