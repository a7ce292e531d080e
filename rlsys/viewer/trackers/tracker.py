"""Interface of experiment trackers, and their construction.

A tracker keeps one run for a run folder, across stops and resumes, under an id from the folder's first line of
metrics. The tracker itself reports the lines it has, so that after a kill no line is written twice and no line is
lost.
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
"""Name in run.trackers -> required package."""
PROJECT = "rlsys"
FOLDER = "trackers"
"""Folder next to the run folders: default storage of trackers, for all runs together."""

Row = dict[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """Run of a tracker. `run_id`: 16 hexadecimal digits, the same after resumes."""

    folder: Path
    run_id: str
    name: str
    config: dict[str, Any]

    @property
    def storage(self) -> Path:
        return self.folder.resolve().parent / FOLDER


def last_steps(rows: Iterable[tuple[int, Iterable[str]]]) -> dict[str, int]:
    """Map the kind of line (step, eval) to its last train step. `rows`: train step, names of values (KIND/METRIC)."""
    last: dict[str, int] = {}
    for step, names in rows:
        for kind in {name.partition("/")[0] for name in names if "/" in name}:
            last[kind] = max(last.get(kind, 0), step)
    return last


class Tracker(Protocol):
    """Experiment tracker. It may raise any error of its package: the process that feeds it does nothing else."""

    def last_steps(self) -> dict[str, int]:
        """Map the kind of line (step, eval) to the last train step that the tracker has."""
        ...

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        """Write one line of metrics, as `kind/name`, and a table of samples if there are any.

        `time`: unix seconds.
        """
        ...

    def close(self) -> None:
        """Flush everything to the tracker."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Check the trackers. Raises UserError if a package is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"run.trackers = [{', '.join(names)}]: the package {PACKAGES[name]} is not installed: "
                f"pip install 'rlsys[{name}]'"
            )


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    tracker: Tracker = importlib.import_module(f"rlsys.viewer.trackers.to_{name}").open_run(run)
    return tracker
