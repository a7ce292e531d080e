"""metrics.jsonl: one JSON object a line, written by trainer rank 0 only, read by the display and the report.

    {"kind": "run",  "event": "start" | "resume" | "end", "step": n, "time": unix seconds}
    {"kind": "eval", "step": n, "accuracy": ..., ...}
    {"kind": "step", "step": n, "reward": ..., ...}
    {"kind": "warning", "step": n, "name": ..., "seen": ..., "cause": ..., "knob": ..., "samples": [{...}, ...]}

A resumed run trains the steps after its checkpoint again; a `resume` line at step s makes every earlier
`step`, `eval` and `warning` line of a later step void. `warning`: a sign that the run does not learn
(rlsys/obs/symptoms.py); `samples` are texts for a person to read. The file is only ever appended to, save for a torn
last line.
"""

from __future__ import annotations

import bisect
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
"""Bin edges of |logp - mu|, 1e-12 .. 1e2, equal in log10; counts over them add up over ranks and steps."""


def mismatch_counts(gaps: Iterable[float]) -> list[int]:
    """Counts of `gaps` (absolute, in nats) over MISMATCH_EDGES; outliers go to the outermost bins."""
    counts = [0] * (len(MISMATCH_EDGES) - 1)
    for gap in gaps:
        at = bisect.bisect_right(MISMATCH_EDGES, gap) - 1
        counts[min(max(at, 0), len(counts) - 1)] += 1
    return counts


def merge_counts(histograms: Iterable[Sequence[int]]) -> list[int]:
    total = [0] * (len(MISMATCH_EDGES) - 1)
    for counts in histograms:
        total = [a + b for a, b in zip(total, counts, strict=True)]
    return total


def mismatch_quantile(counts: Sequence[float], q: float) -> float:
    """Upper edge of the bin that holds the q-quantile, never below the true one; q = 1 bounds the maximum."""
    total = sum(counts)
    if total == 0:
        raise ValueError("no quantile of an empty histogram")
    seen = 0.0
    for upper, count in zip(MISMATCH_EDGES[1:], counts, strict=True):
        seen += count
        if seen >= q * total:
            return upper
    return MISMATCH_EDGES[-1]


def mismatch_quantiles(values: Mapping[str, Any]) -> dict[str, float]:
    """Of the histograms among a step's values: 99.9 % of the tokens have a smaller gap, and all of them."""
    return {
        f"{name}_{what}": mismatch_quantile(values[f"{name}_hist"], q)
        for name in ("mismatch", "mismatch_kept")
        for what, q in (("p999", 0.999), ("max", 1.0))
        if f"{name}_hist" in values
    }


def run_id_of(run: Path) -> str:
    """Of the run in this folder, once it has a line of metrics: the same over resumes."""
    with (run / FILE_NAME).open() as lines:
        began = json.loads(lines.readline())["time"]
    return run_id(run.resolve().name, began)


def run_id(name: str, began: float) -> str:
    """Of the run that has this name and began at this time: 16 hexadecimal digits."""
    return hashlib.sha256(f"{name} {began}".encode()).hexdigest()[:16]


@dataclass
class Metrics:
    """What a run's metrics.jsonl says after resumes are accounted for. Steps and evals are sorted by step."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    wall_seconds: float = 0.0
    """Time from the first to the last line of each session, added up; the start of engines is not in it."""
    torn_lines: int = 0
    """1 when the last line was cut short by a crash, and was left out."""

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0


def read_metrics(run_dir: Path) -> Metrics:
    """Raises UserError when there is none, or when a line other than a torn last one is not a JSON object."""
    path = run_dir / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{run_dir}: no {FILE_NAME} in it: not a run, or one that has not begun") from None
    out = Metrics()
    latest: dict[tuple[str, int, str], dict[str, Any]] = {}
    session_start = last_time = 0.0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            out.torn_lines = 1
            break
        entry = _parse(line, path, number)
        kind, step = entry["kind"], entry["step"]
        if kind == "run":
            out.runs.append(entry)
            if entry["event"] in ("start", "resume"):
                latest = {k: e for k, e in latest.items() if k[1] <= step}
                out.wall_seconds += last_time - session_start
                session_start = entry["time"]
        else:
            latest[kind, step, entry.get("name", "")] = entry
        last_time = entry["time"]
    out.wall_seconds += last_time - session_start
    out.steps = [latest[k] for k in sorted(latest) if k[0] == "step"]
    out.evals = [latest[k] for k in sorted(latest) if k[0] == "eval"]
    out.warnings = [latest[k] for k in sorted(latest) if k[0] == "warning"]
    return out


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as e:
        raise UserError(f"{path}:{number}: not JSON: {e.msg}") from None
    if not isinstance(entry, dict) or not {"kind", "step", "time"} <= entry.keys():
        raise UserError(f"{path}:{number}: expected an object with kind, step and time")
    return entry


class MetricsTail:
    """Follows metrics.jsonl while another process writes it; hands out whole lines only."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._at = 0
        self._lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Lines that have become complete since the last call. Raises UserError on one that is not ours."""
        try:
            with self._path.open("rb") as f:
                f.seek(self._at)
                data = f.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        lines = whole.decode("utf-8", errors="replace").splitlines()
        entries = [_parse(line, self._path, self._lines + n) for n, line in enumerate(lines, 1)]
        self._lines += len(lines)
        return entries


class MetricsWriter:
    """The only writer of a run's metrics. `resume_step`: steps already done; 0 or None begins a run."""

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        # Imported here: the readers of this module do not need it, and it costs half a second.
        from tensorboardX import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE_NAME
        if path.exists():
            os.truncate(path, _whole_lines_size(path))
        self._file = path.open("a", encoding="utf-8", buffering=1)
        purge = resume_step + 1 if resume_step else None
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge, flush_secs=10)

    def write(self, kind: str, step: int, **values: object) -> dict[str, Any]:
        """Append one line, and return it; numbers also go to TensorBoard as `kind/name`. NaN and infinity become
        null."""
        now = time.time()
        entry: dict[str, Any] = {"kind": kind, "step": step, "time": round(now, 3)}
        for name, value in values.items():
            entry[name] = None if isinstance(value, float) and not math.isfinite(value) else value
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, global_step=step, walltime=now)
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        return entry

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _whole_lines_size(path: Path) -> int:
    """Bytes up to and with the last newline; 0 when there is no file."""
    try:
        return path.read_bytes().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0
