"""Curves of a run for a page: metrics.jsonl followed line by line, and never more points than a screen shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.obs.metrics import MetricsTail

_PARTS = ("rollout", "train", "sync")
Point = float | None


class RunCurves:
    """Of one run. Holds the numbers of its step and eval lines; a later step void after a resume is forgotten."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = MetricsTail(run_dir)
        self._steps: dict[int, dict[str, Any]] = {}
        self._evals: dict[int, dict[str, Any]] = {}
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
                    self._steps = {k: v for k, v in self._steps.items() if k <= step}
                    self._evals = {k: v for k, v in self._evals.items() if k <= step}
                    self.warnings = [w for w in self.warnings if w["step"] <= step]
                    self._began_anew.add(step + 1)
            elif kind == "warning":
                self.warnings.append(entry)
            elif kind in ("step", "eval"):
                numbers = {k: v for k, v in entry.items() if isinstance(v, int | float) and k != "step"}
                (self._steps if kind == "step" else self._evals)[step] = numbers

    @property
    def last_step(self) -> int:
        return max(self._steps, default=0)

    @property
    def names(self) -> list[str]:
        """Of all metrics; those of evaluations begin with `eval.`."""
        of_steps = {name for entry in self._steps.values() for name in entry}
        of_evals = {f"eval.{name}" for entry in self._evals.values() for name in entry}
        return sorted((of_steps | of_evals) - {"time", "eval.time"})

    def curve(self, name: str, points: int) -> dict[str, list[Point]]:
        """`x`: steps, `y`: values; where there are more than `points`, means over as many steps each."""
        source, key = (
            (self._evals, name.removeprefix("eval.")) if name.startswith("eval.") else (self._steps, name)
        )
        found = [(step, entry[key]) for step, entry in sorted(source.items()) if key in entry]
        width = -(-len(found) // points) if found else 1
        bins = [found[i : i + width] for i in range(0, len(found), width)]
        return {"x": [_mean([x for x, _ in b]) for b in bins], "y": [_mean([y for _, y in b]) for b in bins]}

    def timeline(self, last: int) -> list[dict[str, float]]:
        """Seconds of the last steps: in their parts, in what the parts leave over, and between two steps
        (evaluation, checkpoint), or, where the run was stopped in between, in that stop."""
        out: list[dict[str, float]] = []
        ended: float | None = None
        for step, entry in sorted(self._steps.items())[-last - 1 :]:
            seconds = entry.get("time_step")
            if seconds is None:
                continue
            parts = {part: entry.get(f"time_{part}", 0.0) for part in _PARTS}
            between = max(0.0, entry["time"] - seconds - ended) if ended is not None else 0.0
            stopped = step in self._began_anew
            out.append(
                {
                    "step": step,
                    **parts,
                    "other": max(0.0, seconds - sum(parts.values())),
                    "between": 0.0 if stopped else between,
                    "stopped": between if stopped else 0.0,
                }
            )
            ended = entry["time"]
        return out[-last:]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
