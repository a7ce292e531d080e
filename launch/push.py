"""What a weight push comes to: bytes of senders and receivers, and seconds. From config.json and the layout alone."""

from __future__ import annotations

from launch.environment import on_cuda
from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.weights.senders import SendersPlan, plan_senders

GB = 1e9
RATES = {"tensor": 20.0, "broadcast": 10.0, "sharded": 10.0, "disk": 1.0, "disk_delta": 1.0, "adapter": 20.0}
"""GB/s assumed of a push: memory of one machine, a fast network, a shared folder (written, then read)."""
LINK = 50.0
"""GB/s of one 400 Gb/s port, of which hosts of H100s have one a GPU (NVIDIA's data sheet of the DGX H100)."""


def senders_of(config: Config, hf: HFConfig) -> SendersPlan:
    """Who sends what with weights.method = sharded."""
    return plan_senders(config, hf, experts_together=not on_cuda(config))


def describe_push(config: Config, hf: HFConfig, size: float) -> list[tuple[str, str]]:
    """`size`: bytes of the model as it is pushed."""
    method, rate = config.weights.method, RATES[config.weights.method]
    facts = [
        (
            "a weight push",
            f"{_gb(size)} GB to each engine, about {short(size / GB / rate, 2)} s at {rate:g} GB/s ({method})",
        )
    ]
    if (at_once := config.weights.rolling) is not None:
        rounds, go_on = push_rounds(config), config.engine.count - at_once
        told = f"{rounds}, of {at_once} engines each, while {go_on} or more go on; the trainer sends so often"
        facts.append(("its rounds", told))
    if method == "sharded":
        plan = senders_of(config, hf)
        facts.append(("its senders", describe_senders(plan)))
    return facts


def push_rounds(config: Config) -> int:
    """How often the trainer sends the model in a push, and each time it takes as long."""
    at_once = config.weights.rolling
    return 1 if at_once is None else -(-config.engine.count // at_once)


def describe_senders(plan: SendersPlan) -> str:
    return (
        f"{len(plan.sendings)} of {len(plan.sent)} trainer ranks; a rank sends {_gb(plan.mean)} GB on average, at "
        f"most {_gb(max(plan.sent))}; an engine rank receives {_gb(plan.received)}: {short(seconds(plan), 2)} s or "
        f"more at {LINK:g} GB/s a link"
    )


def seconds(plan: SendersPlan) -> float:
    """At the least: senders take turns, so what each engine rank receives goes through one link."""
    return max(plan.received, *plan.sent) / GB / LINK


def _gb(size: float) -> str:
    return short(size / GB)


def short(value: float, digits: int = 3) -> str:
    """A figure without an exponent."""
    return f"{value:.{digits}g}" if value < 100 else f"{value:,.0f}"
