"""metrics.jsonl: one JSON object per line, written by trainer rank 0 only, read by the display and the report.

    {"kind": "run",  "event": "start" | "resume" | "end", "step": n, "time": unix seconds}
    {"kind": "eval", "step": n, "accuracy": ..., ...}
    {"kind": "step", "step": n, "reward": ..., ...}
    {"kind": "warning", "step": n, "name": ..., "seen": ..., "cause": ..., "knob": ..., "samples": [{...}, ...]}

A resumed run repeats the steps after its checkpoint; a `resume` line at step s invalidates all earlier
`step`, `eval` and `warning` lines of later steps. `warning`: a symptom that the run does not learn
(rlsys/obs/symptoms.py); `samples` are texts for people. Lines are only appended, except that a torn last line
is removed.
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
"""Bin edges of |logp - mu|, 1e-12 .. 1e2, evenly spaced in log10; histograms can be summed over ranks and steps."""


def censored_by_cause(entry: Mapping[str, Any]) -> dict[str, int]:
    """Return the censored samples of a `step` line by cause, without zeros; since the process started."""
    prefix = "censored_samples_"
    return {key.removeprefix(prefix): int(n) for key, n in entry.items() if key.startswith(prefix) and n}


def merge_counts(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Sum histograms."""
    total = [0] * (len(MISMATCH_EDGES) - 1)
    for counts in histograms:
        total = [a + b for a, b in zip(total, counts, strict=True)]
    return total


def mismatch_quantile(counts: Sequence[float], q: float) -> float:
    """Return the upper edge of the bin that contains the q-quantile, an upper bound; q = 1 bounds the maximum."""
    total = sum(counts)
    if total == 0:
        raise ValueError("no quantile of an empty histogram")
    cumulative = 0.0
    for upper, count in zip(MISMATCH_EDGES[1:], counts, strict=True):
        cumulative += count
        if cumulative >= q * total:
            return upper
    return MISMATCH_EDGES[-1]


def mismatch_quantiles(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the 99.9 % quantile and the maximum of the histograms among a step's values."""
    return {
        f"{name}_{suffix}": mismatch_quantile(values[f"{name}_hist"], q)
        for name in ("mismatch", "mismatch_kept")
        for suffix, q in (("p999", 0.999), ("max", 1.0))
        if f"{name}_hist" in values
    }


def read_run_id(run: Path) -> str:
    """Return the id of the run in this folder, once it has a line of metrics; the same after resumes."""
    with (run / FILE_NAME).open() as lines:
        start_time = json.loads(lines.readline())["time"]
    return run_id(run.resolve().name, start_time)


def run_id(name: str, start_time: float) -> str:
    """Return the id of a run with this name and start time: 16 hexadecimal digits."""
    return hashlib.sha256(f"{name} {start_time}".encode()).hexdigest()[:16]


@dataclass
class Metrics:
    """Content of a run's metrics.jsonl after resumes are applied. Steps and evals are sorted by step."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    wall_seconds: float = 0.0
    """Sum over sessions of the time from the first to the last line; excludes the start of engines."""
    torn_lines: int = 0
    """1 if the last line was truncated by a crash, and ignored."""

    @property
    def last_step(self) -> int:
        """Number of the last train step."""
        return int(self.steps[-1]["step"]) if self.steps else 0


def read_metrics(run_dir: Path) -> Metrics:
    """Read a run's metrics.

    Raises:
        UserError: there are none, or a line other than a torn last one is not a JSON object.
    """
    path = run_dir / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(
            f"{run_dir}: contains no {FILE_NAME}: not a run, or one that has not started"
        ) from None
    out = Metrics()
    latest: dict[tuple[str, int, str], dict[str, Any]] = {}
    session_start = last_time = None
    out.torn_lines = int(bool(lines.pop()))
    for number, line in enumerate(lines, 1):
        entry = _parse(line, path, number)
        kind, step = entry["kind"], entry["step"]
        if kind == "run":
            out.runs.append(entry)
            if entry["event"] in ("start", "resume"):
                latest = {k: e for k, e in latest.items() if k[1] <= step}
                out.wall_seconds += (last_time or 0.0) - (session_start or 0.0)
                session_start = entry["time"]
        else:
            latest[kind, step, entry.get("name", "")] = entry
        last_time = entry["time"]
        if session_start is None:  # an evaluation of its own writes no line at its start
            session_start = last_time
    out.wall_seconds += (last_time or 0.0) - (session_start or 0.0)
    out.steps = [latest[k] for k in sorted(latest) if k[0] == "step"]
    out.evals = [latest[k] for k in sorted(latest) if k[0] == "eval"]
    out.warnings = [latest[k] for k in sorted(latest) if k[0] == "warning"]
    return out


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
    """Reads metrics.jsonl while another process writes it; returns complete lines only."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._offset = 0
        self._lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that were completed since the last call.

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
    """The only writer of a run's metrics. `resume_step`: number of steps already done; 0 or None starts a run."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        # Imported here: readers of metrics do not need it, and it takes half a second.
        from tensorboardX import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        if path.exists():
            os.truncate(path, _whole_lines_size(path))
        self._file = path.open("a", encoding="utf-8", buffering=1)
        purge = resume_step + 1 if resume_step else None
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=10)

    def write(self, kind: str, step: int, **values: object) -> dict[str, Any]:
        """Append and return one line; numbers are also written to TensorBoard as `kind/name`.

        NaN and infinity become null.
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
    """Return the number of bytes up to and including the last newline; 0 without a file."""
    try:
        return path.read_bytes().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0
