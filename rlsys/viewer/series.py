"""Curves of a run for a page: metrics.jsonl followed line by line, and never more points than a screen shows."""

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
    """One metric: its values at rising steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def put(self, step: int, value: float) -> None:
        if self.steps and self.steps[-1] >= step:
            self.forget_from(step)
        self.steps.append(step)
        self.values.append(value)

    def forget_from(self, step: int) -> None:
        """Of this step and later ones."""
        at = bisect.bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]

    def at(self, step: int) -> float | None:
        found = bisect.bisect_left(self.steps, step)
        return self.values[found] if found < len(self.steps) and self.steps[found] == step else None


class RunCurves:
    """Of one run: the numbers of its step and eval lines. What a resume makes void is forgotten."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = MetricsTail(run_dir)
        self._columns: dict[str, Column] = {}
        """By name; those of evaluations begin with `eval.`."""
        self.warnings: list[dict[str, Any]] = []
        """Of signs that the run does not learn (rlsys/obs/symptoms.py): step, seen, cause, knob, samples."""
        self._began_anew: set[int] = set()
        """Steps that are the first of a session which went on after a stop."""
        self.ended = False
        self.last_time: float | None = None

    def follow(self) -> None:
        """Take in what was written since the last call. Raises UserError for a line that is not ours."""
        for entry in self._tail.read():
            kind, step = entry["kind"], int(entry["step"])
            self.last_time = entry["time"]
            if kind == "run":
                self.ended = entry["event"] == "end"
                if entry["event"] in ("start", "resume"):
                    self._begin_anew(step + 1)
            elif kind == "warning":
                self.warnings.append(entry)
            elif kind in ("step", "eval"):
                before = "eval." if kind == "eval" else ""
                for name, value in entry.items():
                    if isinstance(value, int | float) and name != "step":
                        self._columns.setdefault(before + name, Column()).put(step, value)

    def _begin_anew(self, step: int) -> None:
        for column in self._columns.values():
            column.forget_from(step)
        self.warnings = [w for w in self.warnings if w["step"] < step]
        self._began_anew.add(step)

    @property
    def last_step(self) -> int:
        done = self._columns.get("time", Column()).steps
        return done[-1] if done else 0

    @property
    def names(self) -> list[str]:
        """Of all metrics."""
        return sorted(self._columns.keys() - {"time", "eval.time"})

    def curve(self, name: str, points: int) -> dict[str, list[float]]:
        """`x`: steps, `y`: values; where there are more than `points`, means over as many steps each."""
        column = self._columns.get(name, Column())
        count = len(column.steps)
        if not count:
            return {"x": [], "y": []}
        starts = np.arange(0, count, -(-count // points))
        sizes = np.diff(starts, append=count)

        def means(values: array[int] | array[float]) -> list[float]:
            found: list[float] = (np.add.reduceat(np.array(values, dtype=float), starts) / sizes).tolist()
            return found

        return {"x": means(column.steps), "y": means(column.values)}

    def timeline(self, last: int) -> list[dict[str, float]]:
        """Seconds of the last steps: in their parts, in what the parts leave over, and between two steps
        (evaluation, checkpoint), or, where the run was stopped in between, in that stop."""
        return list(self._timeline(last))[-last:]

    def _timeline(self, last: int) -> Iterator[dict[str, float]]:
        ended: float | None = None
        for step in self._columns.get("time_step", Column()).steps[-last - 1 :]:
            told = {name: self._columns[name].at(step) if name in self._columns else None for name in _TIMES}
            seconds, end = told["time_step"] or 0.0, told["time"] or 0.0
            parts = {part: told[f"time_{part}"] or 0.0 for part in _PARTS}
            between = max(0.0, end - seconds - ended) if ended is not None else 0.0
            stopped = step in self._began_anew
            yield {
                "step": step,
                **parts,
                "other": max(0.0, seconds - sum(parts.values())),
                "between": 0.0 if stopped else between,
                "stopped": between if stopped else 0.0,
            }
            ended = end


_TIMES = ("time", "time_step", *(f"time_{part}" for part in _PARTS))
