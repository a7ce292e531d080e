"""Interface of experiment trackers, and functions that open them.

A tracker has one run for a run folder, across stops and resumes. The run's id comes from the folder's first line of
metrics. The tracker reports the lines that it has, so that no line is lost or written twice after a kill.
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
"""Folder next to the run folders in which trackers store the data of all runs by default."""

Row = dict[str, Any]
"""Column -> value of a sample in a table."""


@dataclass(frozen=True)
class TrackedRun:
    """A run for a tracker.

    Attributes:
        folder: run folder.
        run_id: 16 hexadecimal digits, the same after a resume.
        config: config of the run, as JSON.
    """

    folder: Path
    run_id: str
    name: str
    config: dict[str, Any]

    @property
    def storage(self) -> Path:
        """Folder in which trackers store their data by default."""
        return self.folder.resolve().parent / FOLDER


def last_steps(rows: Iterable[tuple[int, Iterable[str]]]) -> dict[str, int]:
    """Return kind of line (step, eval) -> last train step.

    Args:
        rows: (train step, names KIND/METRIC of the values) of each line.
    """
    steps: dict[str, int] = {}
    for step, names in rows:
        for kind in {name.partition("/")[0] for name in names if "/" in name}:
            steps[kind] = max(steps.get(kind, 0), step)
    return steps


class Tracker(Protocol):
    """An experiment tracker. Its methods may raise any error of its package."""

    def last_steps(self) -> dict[str, int]:
        """Return kind of line (step, eval) -> last train step whose line the tracker has."""
        ...

    def write(
        self, kind: str, step: int, time: float, values: dict[str, float], samples: Sequence[Row]
    ) -> None:
        """Write a line of metrics.

        Args:
            kind: kind of the line, `step` or `eval`. A metric is written as KIND/NAME.
            step: train step.
            time: Unix time in seconds.
            values: name of a metric -> value.
            samples: samples, written as a table; empty: no table.
        """
        ...

    def close(self) -> None:
        """Write all pending data, and end the run's session."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of trackers are installed.

    Raises:
        UserError: a package is not installed.
    """
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"run.trackers = [{', '.join(names)}]: the package {PACKAGES[name]} is not installed: "
                f"pip install 'rlsys[{name}]'"
            )


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Open a run in the tracker `name`."""
    tracker: Tracker = importlib.import_module(f"rlsys.viewer.trackers.to_{name}").open_run(run)
    return tracker
