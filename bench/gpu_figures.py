"""Figures of one part of the drill (gpu.py), for the drill and its parts. Imports no torch."""

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
    """Raised by a part that needs a GPU on a host without one.

    Attributes:
        STATUS: the part's status in the results of the drill.
    """

    STATUS: ClassVar[str] = "no CUDA device"


class Figures:
    """Owns the figures of one part and their JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._start = time.monotonic()

    def __call__(self, **values: Any) -> None:
        """Add figures, and replace the file. `at_s` is the time of the last call in seconds since the start."""
        self._values |= values | {"at_s": round(time.monotonic() - self._start, 1)}
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._values, indent=1, default=str) + "\n")
        partial.replace(self._path)
