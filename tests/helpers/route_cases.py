"""Routes and route writers of an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.engine.hooks.route_writer import RouteWriter
from rlsys.segments.records import FOLDER

LAYERS, TOPK = 5, 2


def writer(folder: Path, start: int = 1, size: int = 10**6) -> RouteWriter:
    """Return a route writer of process start `start` of engine-0 in a run folder."""
    (folder / FOLDER).mkdir(exist_ok=True)
    return RouteWriter(folder / FOLDER, 0, "engine-0", start, 0, size)


def chosen(rows: int, experts: int = 300) -> NDArray[np.int32]:
    """Return expert ids below `experts`, `[rows, LAYERS, TOPK]`."""
    return (np.arange(rows * LAYERS * TOPK, dtype=np.int32) * 7 % experts).reshape(rows, LAYERS, TOPK)
