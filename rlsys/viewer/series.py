"""RunCurves: the metrics of a run as curves for the dashboard.

metrics.jsonl is read incrementally, and curves are reduced to the resolution of a screen.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.obs.metrics import MetricsTail

_PARTS = ("rollout", "train", "sync")


class Column:
    """The values of a metric, at ascending steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def append(self, step: int, value: float) -> None:
        """Add a value, and remove earlier values of this step and later ones."""
        if self.steps and self.steps[-1] >= step:
            self.truncate(step)
        self.steps.append(step)
        self.values.append(value)

    def truncate(self, step: int) -> None:
        """Remove the values of this step and later ones."""
        index = bisect.bisect_left(self.steps, step)
        del self.steps[index:], self.values[index:]

    def value(self, step: int) -> float | None:
        """Return the value at a step; None if it has none."""
        index = bisect.bisect_left(self.steps, step)
        return self.values[index] if index < len(self.steps) and self.steps[index] == step else None


class RunCurves:
    """The numbers in the step and eval lines of a run. A resume removes the lines of steps that are trained again.

    Attributes:
        warnings: warnings of symptoms (rlsys/obs/symptoms.py), each with step, seen, cause, knob and samples.
        is_finished: whether the run has ended.
        last_time: Unix time of the last line, in seconds; None before the first line.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tail = MetricsTail(run_dir)
        self._columns: dict[str, Column] = {}
        """Name of a metric -> its values. Names of evaluations start with `eval.`."""
        self.warnings: list[dict[str, Any]] = []
        self._session_starts: set[int] = set()
        """First steps of sessions that continued after a stop."""
        self.is_finished = False
        self.last_time: float | None = None

    def follow(self) -> None:
        """Read the lines that were written since the last call.

        Raises:
            UserError: a line has an unknown format.
        """
        for entry in self._tail.read():
            kind, step = entry["kind"], int(entry["step"])
            self.last_time = entry["time"]
            if kind == "run":
                self.is_finished = entry["event"] == "end"
                if entry["event"] in ("start", "resume"):
                    self._start_session(step + 1)
            elif kind == "warning":
                self.warnings.append(entry)
            elif kind in ("step", "eval"):
                prefix = "eval." if kind == "eval" else ""
                for name, value in entry.items():
                    if isinstance(value, int | float) and name != "step":
                        self._columns.setdefault(prefix + name, Column()).append(step, value)

    def _start_session(self, step: int) -> None:
        """Remove the values and warnings from the first step of a session on."""
        for column in self._columns.values():
            column.truncate(step)
        self.warnings = [w for w in self.warnings if w["step"] < step]
        self._session_starts.add(step)

    @property
    def last_step(self) -> int:
        """Number of the last train step; 0: none."""
        steps = self._columns.get("time", Column()).steps
        return steps[-1] if steps else 0

    @property
    def names(self) -> list[str]:
        """Names of all metrics."""
        return sorted(self._columns.keys() - {"time", "eval.time"})

    def curve(self, name: str, points: int) -> dict[str, list[float]]:
        """Return the points of a metric.

        Args:
            name: name of the metric.
            points: largest number of points. With more values, each point is the mean of equally many values.

        Returns:
            `x`: steps, `y`: values; both empty for a metric without values.
        """
        column = self._columns.get(name, Column())
        count = len(column.steps)
        if not count:
            return {"x": [], "y": []}
        starts = np.arange(0, count, -(-count // points))
        sizes = np.diff(starts, append=count)

        def means(values: array[int] | array[float]) -> list[float]:
            sums = np.add.reduceat(np.array(values, dtype=float), starts)
            return [float(mean) for mean in sums / sizes]

        return {"x": means(column.steps), "y": means(column.values)}

    def timeline(self, steps: int) -> list[dict[str, float]]:
        """Return the durations of the parts of the last steps, in seconds.

        Args:
            steps: number of steps.

        Returns:
            For each step: `step`, `rollout`, `train`, `sync`, and
                other: the rest of the step,
                between: time since the previous step, for evaluation and checkpoint,
                stopped: the same if the run was stopped in between.
        """
        return list(self._timeline(steps))[-steps:]

    def _timeline(self, steps: int) -> Iterator[dict[str, float]]:
        previous_end: float | None = None
        for step in self._columns.get("time_step", Column()).steps[-steps - 1 :]:
            values = {
                name: self._columns[name].value(step) if name in self._columns else None for name in _TIMES
            }
            seconds, end = values["time_step"] or 0.0, values["time"] or 0.0
            parts = {part: values[f"time_{part}"] or 0.0 for part in _PARTS}
            between = max(0.0, end - seconds - previous_end) if previous_end is not None else 0.0
            after_stop = step in self._session_starts
            yield {
                "step": step,
                **parts,
                "other": max(0.0, seconds - sum(parts.values())),
                "between": 0.0 if after_stop else between,
                "stopped": between if after_stop else 0.0,
            }
            previous_end = end


_TIMES = ("time", "time_step", *(f"time_{part}" for part in _PARTS))
