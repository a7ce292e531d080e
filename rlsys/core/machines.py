"""What kinds of GPU can do, read from machines.yaml beside this file, and which share of it programs reach."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import yaml

TRAINED_SHARE = 0.3
"""Of the peak, that training reaches. An assumption, for models with experts."""
PREFILL_SHARE = 0.4
"""Of the peak, that reading a prompt reaches. An assumption."""
DECODE_SHARE = 0.6
"""Of the memory's bandwidth, that decoding reaches. An assumption."""
PASS_SECONDS = 0.003
"""Of a forward pass, besides its work: scheduling and sampling on the host. An assumption."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of GPU."""

    tflops: dict[str, float]
    """Dense TFLOP a second, by the model's dtype."""
    bandwidth: float
    """TB a second of its memory."""
    memory: float
    """GB of it."""
    source: str


@functools.cache
def machines() -> dict[str, Machine]:
    text = Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, Machine])
