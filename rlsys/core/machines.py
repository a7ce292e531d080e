"""Performance of GPU types (machines.yaml in this folder), and fractions of it that kernels and training reach."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import yaml

TRAIN_EFFICIENCY = 0.3
"""Fraction of the peak FLOP/s that training of MoE models reaches. An assumption."""
PASS_OVERHEAD_SECONDS = 0.003
"""Overhead of a forward pass in seconds, for scheduling and sampling on the host. An assumption."""


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fractions of a GPU's peak that an engine's kernels reach.

    The defaults are assumptions, for GPUs without measurements.

    Attributes:
        dense_decode: fraction of the memory bandwidth with which decoding reads weights other than experts.
        expert_decode: fraction of the memory bandwidth with which decoding reads experts.
        cache: fraction of the memory bandwidth with which decoding reads the KV cache.
        dense_prefill: fraction of the peak FLOP/s of prefill in weights other than experts.
        expert_prefill: fraction of the peak FLOP/s of prefill in experts.
    """

    dense_decode: float = 0.6
    expert_decode: float = 0.6
    cache: float = 0.6
    dense_prefill: float = 0.4
    expert_prefill: float = 0.4


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Performance of one GPU type.

    Attributes:
        tflops: dense TFLOP/s by dtype.
        bandwidth: memory bandwidth in TB/s.
        memory: memory in GB.
        source: document with these values.
        efficiency: fractions of these values that an engine's kernels reach.
    """

    tflops: dict[str, float]
    bandwidth: float
    memory: float
    source: str
    efficiency: Efficiency = Efficiency()


@functools.cache
def machines() -> dict[str, Machine]:
    """Return the GPU types of machines.yaml by name."""
    text = Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, Machine])
