"""Performance of GPU types, from machines.yaml beside this file, and the fractions of it that programs reach."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import yaml

TRAIN_EFFICIENCY = 0.3
"""Fraction of the peak FLOPs that training reaches. An assumption, for MoE models."""
PASS_OVERHEAD_SECONDS = 0.003
"""Overhead of a forward pass: scheduling and sampling on the host. An assumption."""


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fractions of a GPU's peak that an engine's kernels reach.

    The defaults are assumptions, for GPUs without measurements.
    """

    dense_decode: float = 0.6
    """Fraction of the memory bandwidth at which decoding reads weights other than those of experts."""
    expert_decode: float = 0.6
    """Fraction of the memory bandwidth at which decoding reads experts."""
    cache: float = 0.6
    """Fraction of the memory bandwidth at which the KV cache is read."""
    dense_prefill: float = 0.4
    """Fraction of the peak FLOPs in matrices other than those of experts."""
    expert_prefill: float = 0.4
    """Fraction of the peak FLOPs in experts."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU type."""

    tflops: dict[str, float]
    """Dense TFLOPS by dtype."""
    bandwidth: float
    """Memory bandwidth in TB/s."""
    memory: float
    """Memory in GB."""
    source: str
    efficiency: Efficiency = Efficiency()


@functools.cache
def machines() -> dict[str, Machine]:
    """Return the GPU types of machines.yaml by name."""
    text = Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, Machine])
