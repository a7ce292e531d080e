"""Costs as a run of one's own shows them: its metrics, and what SGLang logs of its batches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np

from rlsys.errors import UserError
from rlsys.obs.metrics import read_metrics
from rlsys.planner.costs import Costs
from rlsys.planner.lengths import Lengths
from rlsys.rollout.reader import RunReader

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)")
_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+),.*?input throughput \(token/s\): ([\d.]+)")
_LARGE = 64
"""Tokens of a prefill batch from which its throughput tells of tokens, not of the pass."""
_FEWEST = 5
"""Lines about decoding, or steps, from which something can be told."""


def calibrated(run: Path) -> tuple[Costs, Lengths]:
    """Of a run folder, on the machine and layout that it ran on. Raises UserError when it says too little."""
    steps = read_metrics(run).steps
    if len(steps) < _FEWEST:
        raise UserError(f"--calibrate {run}: {len(steps)} train steps; expected at least {_FEWEST}")
    lengths = Lengths(found := RunReader(run).lengths(), max(found, default=1))
    logs = sorted((run / "logs").glob("engine-*.log"))
    lines = [line for log in logs for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    every_pass, decoded = _decoding(run, lines)
    prompt = _prefill(lines)
    later = steps[1:]  # the first one compiles
    return Costs(
        every_pass=every_pass,
        decoded_token=decoded,
        prompt_token=decoded if prompt is None else prompt,
        trained_token=_slope([(s["tokens"], s["time_train"]) for s in later])[1],
        train_step=_slope([(s["tokens"], s["time_train"]) for s in later])[0],
        push=median(s["time_sync"] for s in later),
    ), lengths


def _decoding(run: Path, lines: Iterable[str]) -> tuple[float, float]:
    """Seconds of a pass, and of each request in it, from what the engine logs every 40 passes."""
    by_running: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        if (found := _DECODE.search(line)) and (rate := float(found[2])) > 0:
            by_running[int(found[1])].append(int(found[1]) / rate)
    if sum(map(len, by_running.values())) < _FEWEST:
        raise UserError(f"--calibrate {run}: logs/engine-*.log: fewer than {_FEWEST} lines about decoding")
    return _slope([(n, seconds) for n, each in by_running.items() for seconds in each])


def _prefill(lines: Iterable[str]) -> float | None:
    """Seconds of a prompt's token: of the fastest tenth, since the others count the time between two batches."""
    rates = [float(f[2]) for line in lines if (f := _PREFILL.search(line)) and int(f[1]) >= _LARGE]
    return 1.0 / float(np.quantile(rates, 0.9)) if rates else None


def _slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative, by Theil and Sen: half of the points may be far off."""
    x, y = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    first, second = np.triu_indices(len(x), 1)
    apart = x[first] != x[second]
    if not apart.any():
        return float(np.median(y)), 0.0
    slopes = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    slope = max(0.0, float(np.median(slopes)))
    intercept = float(np.median(y - slope * x))
    if intercept < 0:
        return 0.0, float(np.median(y / x))
    return intercept, slope
