"""Figures of one part of the drill (bench/gpu.py), for the driver and the parts. Imports no torch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # tests.helpers
MODELS = "RLSYS_DRILL_MODELS"
"""Environment variable with the private folder of a drill's models."""


class NoDevice(Exception):
    """The part needs a GPU, and the host has none."""

    STATUS: ClassVar[str] = "no CUDA device"


class Figures:
    """Owns the figures of one part; writes them to disk after each call."""

    def __init__(self, path: Path) -> None:
        self._path, self._values, self._start = path, dict[str, Any](), time.monotonic()

    def __call__(self, **values: Any) -> None:
        self._values |= values | {"at_s": round(time.monotonic() - self._start, 1)}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._values, indent=1, default=str) + "\n")
        part.replace(self._path)
