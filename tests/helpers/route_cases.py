"""Routes as an engine makes and writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.engine.hooks.route_writer import RouteWriter
from rlsys.segments.records import FOLDER

LAYERS, TOPK = 5, 2


def writer(folder: Path, start: int = 1, size: int = 10**6) -> RouteWriter:
    """Of start `start` of engine-0; `folder`: the run's."""
    (folder / FOLDER).mkdir(exist_ok=True)
    return RouteWriter(folder / FOLDER, 0, "engine-0", start, 0, size)


def chosen(rows: int, most: int = 300) -> NDArray[np.int32]:
    """Experts `[rows, LAYERS, TOPK]` below `most`."""
    return (np.arange(rows * LAYERS * TOPK, dtype=np.int32) * 7 % most).reshape(rows, LAYERS, TOPK)
