"""What a tracker is to us, and how one is opened.

A tracker keeps one run for a run folder, whatever is stopped and started, under an id that follows from the folder's
first line of metrics. What it holds already it is asked itself, so that after a kill nothing is written twice and
nothing is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlsys.core.errors import UserError

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}
"""Name in run.trackers -> package that it needs."""
PROJECT = "rlsys"
FOLDER = "trackers"
"""Beside the run folders: where a tracker that is told no other place keeps what it gets, all runs together."""

Row = dict[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """`run_id`: of 16 hexadecimal digits, the same over resumes."""

    folder: Path
    run_id: str
    name: str
    config: dict[str, Any]

    @property
    def place(self) -> Path:
        return self.folder.resolve().parent / FOLDER


def last_steps(rows: Iterable[tuple[int, Iterable[str]]]) -> dict[str, int]:
    """Kind of line (step, eval) -> its last train step. `rows`: train step, names of values (KIND/METRIC)."""
    held: dict[str, int] = {}
    for step, names in rows:
        for kind in {name.partition("/")[0] for name in names if "/" in name}:
            held[kind] = max(held.get(kind, 0), step)
    return held


class Tracker(Protocol):
    """Raises whatever its package does: the process that feeds it is nobody else's."""

    def written(self) -> dict[str, int]:
        """Kind of line (step, eval) -> the last train step of which it holds one."""
        ...

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        """One line of metrics, as `kind/name`, and a table of samples where there are any. `time`: unix seconds."""
        ...

    def close(self) -> None:
        """Everything is with the tracker when this returns."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError for one whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"run.trackers = [{', '.join(names)}]: the package {PACKAGES[name]} is not installed: "
                f"pip install 'rlsys[{name}]'"
            )


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    made: Tracker = importlib.import_module(f"rlsys.viewer.trackers.to_{name}").open_run(run)
    return made
