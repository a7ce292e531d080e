"""metrics.jsonl, which trainer rank 0 writes, and the display and the report read. Each line is a JSON object:

    {"kind": "run",  "event": "start" | "resume" | "end", "step": n, "time": seconds since the Unix epoch}
    {"kind": "eval", "step": n, "time": ..., "accuracy": ..., ...}
    {"kind": "step", "step": n, "time": ..., "reward": ..., ...}
    {"kind": "warning", "step": n, "time": ..., "name": ..., "seen": ..., "cause": ..., "knob": ..., "samples": [...]}

A `warning` is a symptom of a run that does not learn (rlsys/obs/symptoms.py), with texts for people. A resumed run
repeats the steps after its checkpoint, so a `resume` line at step s invalidates all earlier `step`, `eval` and
`warning` lines of later steps. Lines are only appended, but the writer first removes an incomplete last line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError

FILE_NAME = "metrics.jsonl"

_BINS_PER_DECADE = 8
MISMATCH_EDGES: tuple[float, ...] = tuple(
    10 ** (i / _BINS_PER_DECADE) for i in range(-12 * _BINS_PER_DECADE, 2 * _BINS_PER_DECADE + 1)
)
"""Bin edges of histograms of |logp - mu|, from 1e-12 to 1e2, evenly spaced in log10."""


def censored_by_cause(entry: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of censored samples by cause in a `step` line, without causes that did not occur.

    The rollout process counts them since its start.
    """
    prefix = "censored_samples_"
    return {key.removeprefix(prefix): int(n) for key, n in entry.items() if key.startswith(prefix) and n}


def merge_counts(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of histograms with the bins MISMATCH_EDGES."""
    total = [0] * (len(MISMATCH_EDGES) - 1)
    for counts in histograms:
        total = [a + b for a, b in zip(total, counts, strict=True)]
    return total


def mismatch_quantile(counts: Sequence[float], q: float) -> float:
    """Return an upper bound of a quantile: the upper edge of the bin that contains it.

    Args:
        counts: histogram with the bins MISMATCH_EDGES.
        q: fraction of values up to the quantile; 1: the maximum.

    Raises:
        ValueError: the histogram is empty.
    """
    total = sum(counts)
    if total == 0:
        raise ValueError(f"quantile {q:g}: the histogram is empty; expected at least one value")
    cumulative = 0.0
    for upper, count in zip(MISMATCH_EDGES[1:], counts, strict=True):
        cumulative += count
        if cumulative >= q * total:
            return upper
    return MISMATCH_EDGES[-1]


def mismatch_quantiles(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics NAME_p999 and NAME_max of the histograms NAME_hist in the values of a step."""
    return {
        f"{name}_{suffix}": mismatch_quantile(values[f"{name}_hist"], q)
        for name in ("mismatch", "mismatch_kept")
        for suffix, q in (("p999", 0.999), ("max", 1.0))
        if f"{name}_hist" in values
    }


def read_run_id(run: Path) -> str:
    """Return the id of the run in a folder, which must have a line of metrics. It stays the same after resumes."""
    with (run / FILE_NAME).open() as lines:
        start_time = json.loads(lines.readline())["time"]
    return run_id(run.resolve().name, start_time)


def run_id(name: str, start_time: float) -> str:
    """Return the id of the run with this name and start time, 16 hexadecimal digits.

    Args:
        name: name of the run folder.
        start_time: `time` of the first line of metrics.
    """
    return hashlib.sha256(f"{name} {start_time}".encode()).hexdigest()[:16]


@dataclass
class Metrics:
    """Valid lines of a run's metrics.jsonl.

    Attributes:
        runs: the `run` lines, in the order of the file.
        steps: the `step` lines, sorted by step.
        evals: the `eval` lines, sorted by step.
        warnings: the `warning` lines, sorted by step.
        wall_seconds: sum over sessions of the time from the first to the last line, without the start of engines.
        torn_lines: 1 if the last line is incomplete and was ignored, else 0.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    wall_seconds: float = 0.0
    torn_lines: int = 0

    @property
    def last_step(self) -> int:
        """Number of the last train step; 0 before the first step."""
        return int(self.steps[-1]["step"]) if self.steps else 0


def read_metrics(run_dir: Path) -> Metrics:
    """Read a run's metrics.

    Raises:
        UserError: there is no metrics.jsonl, or a complete line is invalid.
    """
    path = run_dir / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(
            f"{run_dir}: contains no {FILE_NAME}: not a run, or one that has not started"
        ) from None
    metrics = Metrics(torn_lines=int(bool(lines.pop())))
    entries: dict[tuple[str, int, str], dict[str, Any]] = {}  # by kind, step and name of a warning
    session_start = last_time = None
    for number, line in enumerate(lines, 1):
        entry = _parse(line, path, number)
        kind, step = entry["kind"], entry["step"]
        if kind == "run":
            metrics.runs.append(entry)
            if entry["event"] in ("start", "resume"):
                entries = {k: e for k, e in entries.items() if k[1] <= step}
                metrics.wall_seconds += (last_time or 0.0) - (session_start or 0.0)
                session_start = entry["time"]
        else:
            entries[kind, step, entry.get("name", "")] = entry
        last_time = entry["time"]
        if session_start is None:  # rlsys eval writes no line at its start
            session_start = last_time
    metrics.wall_seconds += (last_time or 0.0) - (session_start or 0.0)
    metrics.steps = [entries[k] for k in sorted(entries) if k[0] == "step"]
    metrics.evals = [entries[k] for k in sorted(entries) if k[0] == "eval"]
    metrics.warnings = [entries[k] for k in sorted(entries) if k[0] == "warning"]
    return metrics


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except UnicodeDecodeError:
        raise UserError(f"{path}:{number}: not UTF-8 text") from None
    except json.JSONDecodeError as e:
        raise UserError(f"{path}:{number}: not JSON: {e.msg}") from None
    if not isinstance(entry, dict) or not {"kind", "step", "time"} <= entry.keys():
        raise UserError(f"{path}:{number}: expected an object with kind, step and time")
    return entry


class MetricsTail:
    """Reader of metrics.jsonl while another process writes it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._offset = 0
        self._lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that the writer has completed since the last call; none before the file exists.

        Raises:
            UserError: a line is invalid.
        """
        try:
            with self._path.open("rb") as f:
                f.seek(self._offset)
                data = f.read()
        except FileNotFoundError:
            return []
        complete_lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete_lines)
        lines = complete_lines.split(b"\n")[:-1]
        entries = [_parse(line, self._path, self._lines + n) for n, line in enumerate(lines, 1)]
        self._lines += len(lines)
        return entries


class MetricsWriter:
    """The only writer of a run's metrics."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        """Open the files, and remove an incomplete last line.

        Args:
            run_dir: the run folder, which is created if it does not exist.
            resume_step: number of train steps that a resumed run has done; 0 or None: a new run.
        """
        # Imported late: readers of metrics do not need it, and the import takes half a second.
        from tensorboardX import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        if path.exists():
            os.truncate(path, _whole_lines_size(path))
        self._file = path.open("a", encoding="utf-8", buffering=1)
        purge = resume_step + 1 if resume_step else None
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=10)

    def write(self, kind: str, step: int, **values: object) -> dict[str, Any]:
        """Append one line, write its numbers to TensorBoard as KIND/NAME, and return the line.

        NaN and infinity become null in the line.
        """
        timestamp = time.time()
        entry: dict[str, Any] = {"kind": kind, "step": step, "time": round(timestamp, 3)}
        for name, value in values.items():
            entry[name] = None if isinstance(value, float) and not math.isfinite(value) else value
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, global_step=step, walltime=timestamp)
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        return entry

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._board.close()


def _whole_lines_size(path: Path) -> int:
    """Return the size of the complete lines of a file in bytes; 0 if the file does not exist."""
    try:
        return path.read_bytes().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0
