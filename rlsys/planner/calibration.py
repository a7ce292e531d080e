"""Costs as a run of one's own shows them: its metrics, and what SGLang logs of its batches."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.ledger.reader import Length, RunReader
from rlsys.obs.metrics import read_metrics
from rlsys.planner.costs import Costs
from rlsys.planner.lengths import Lengths
from rlsys.planner.simulation import simulate

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)")
_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+),.*?input throughput \(token/s\): ([\d.]+)")
_LARGE = 64
"""Tokens of a prefill batch from which its throughput tells of tokens, not of the pass."""
_FEWEST = 5
"""Lines about decoding, or steps, from which something can be told."""
_ROUNDS, _STEPS, _CAUTION = 4, 12, 0.7
"""Simulations of the calibrating run, their train steps, and how far each goes towards what seems right."""
_PROMPT_TOKENS = 512
"""Of a prompt, where every one was read more than once."""


@dataclass(frozen=True)
class Calibration:
    """Of a run, on the machine and layout that it ran on."""

    by_tp: dict[int, Costs]
    """By the size of an engine."""
    lengths: Lengths
    prompt_tokens: int
    """Of a prompt, in the mean."""

    def costs(self, tp: int) -> Costs:
        """Raises UserError where the run had no such engine."""
        if tp not in self.by_tp:
            seen = ", ".join(map(str, sorted(self.by_tp)))
            raise UserError(
                f"--calibrate: the run's engines are of tp {seen}; nothing tells what tp {tp} costs"
            )
        return self.by_tp[tp]


def calibrated(run: Path) -> Calibration:
    """Raises UserError when the run folder says too little."""
    steps = read_metrics(run).steps
    if len(steps) < _FEWEST:
        raise UserError(f"--calibrate {run}: {len(steps)} train steps; expected at least {_FEWEST}")
    groups = RunReader(run).lengths()
    lengths = lengths_of(groups)
    prompts = [one.prompt for group in groups for one in group if one.prompt is not None]
    prompt = round(fmean(prompts)) if prompts else _PROMPT_TOKENS
    config = load_config(run / "config.yaml")
    later = steps[1:]  # the first one compiles
    step, token = _slope([(s["tokens"] + prompt * config.samples_per_step, s["time_train"]) for s in later])
    by_tp = {}
    for tp in config.engine.tps:
        lines = _log_lines(run, config, tp)
        every_pass, decoded = _decoding(run, lines)
        read = _prefill(lines, every_pass)
        by_tp[tp] = Costs(
            every_pass=every_pass,
            decoded_token=decoded,
            prompt_token=decoded if read is None else read,
            trained_token=token,
            train_step=step,
        )
    waited, pushed = (fmean(_usual([s[name] for s in later])) for name in ("time_rollout", "time_sync"))
    return _fitted(config, Calibration(by_tp, lengths, prompt), waited, pushed)


def _usual(seconds: Sequence[float]) -> list[float]:
    """Without the largest tenth: a checkpoint or an evaluation before the step, a pause of the machine."""
    return sorted(seconds)[: max(1, math.ceil(0.9 * len(seconds)))]


def _fitted(config: Config, found: Calibration, waited: float, pushed: float) -> Calibration:
    """With what no log tells, so that the run's own simulation has its seconds of a step: what an engine's server
    takes for a request, and what a push takes. `waited`, `pushed`: of a step, by the run's metrics."""
    requests = config.slots / config.engine.writers
    for _ in range(_ROUNDS):
        by_tp = found.by_tp
        simulated = simulate(
            config,
            next(iter(by_tp.values())),
            found.lengths,
            prompt_tokens=found.prompt_tokens,
            steps=_STEPS,
            by_tp=by_tp,
        )
        late, longer = waited - simulated.rollout_seconds, pushed - simulated.push_seconds
        fitted = {
            tp: replace(
                one,
                request=max(0.0, one.request + _CAUTION * late / requests),
                push=max(0.0, one.push + longer),
            )
            for tp, one in by_tp.items()
        }
        found = replace(found, by_tp=fitted)
    return found


def lengths_of(groups: Sequence[Sequence[Length]]) -> Lengths:
    """Of the newest half of the groups, since lengths change while a policy learns.

    A response that had not ended is taken to end as one that ended later than it had come: without these, a run that
    is stopped with long responses in flight would show short ones only.
    """
    newest, rng = groups[len(groups) // 2 :], random.Random(0)
    ended = sorted(one.tokens for group in newest for one in group if one.complete)
    longest = max((one.tokens for group in newest for one in group), default=1)

    def whole(one: Length) -> int:
        longer = ended if one.complete else ended[int(np.searchsorted(ended, one.tokens, side="right")) :]
        return one.tokens if one.complete else rng.choice(longer or [longest])

    found = [[whole(one) for one in group] for group in newest]
    return Lengths([n for group in found for n in group] or [1], longest, found or None)


def _log_lines(run: Path, config: Config, tp: int) -> list[str]:
    """Of the engines of this size; of engines that joined, those of engine.tp."""
    lines = []
    for log in sorted((run / "logs").glob("engine-*.log")):
        index = int(found[1]) if (found := re.search(r"engine-(\d+)", log.name)) else 0
        if config.engine.tp_of(index) == tp:
            lines += log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines


def _decoding(run: Path, lines: Iterable[str]) -> tuple[float, float]:
    """Seconds of a pass, and of each request in it, from what the engine logs every 40 passes: where it can be, of
    lines without a prompt since the line before, since the time between two lines counts."""
    all_lines: list[tuple[float, float]] = []
    decoding: list[tuple[float, float]] = []
    prompts = True
    for line in lines:
        if (found := _DECODE.search(line)) and (rate := float(found[2])) > 0:
            point = float(found[1]), int(found[1]) / rate
            all_lines.append(point)
            if not prompts:
                decoding.append(point)
            prompts = False
        elif _PREFILL.search(line):
            prompts = True
    if len(all_lines) < _FEWEST:
        raise UserError(f"--calibrate {run}: logs/engine-*.log: fewer than {_FEWEST} lines about decoding")
    return _mean_line(decoding) if len(decoding) >= _FEWEST else _slope(all_lines)


def _prefill(lines: Iterable[str], every_pass: float) -> float | None:
    """Seconds of a prompt's token, beside those of its pass: of batches right after another one, if there are enough,
    since a line counts the time from one batch to the next; else of the fastest tenth of all."""
    beside: list[float] = []
    second: list[float] = []
    after = False
    for line in lines:
        if (found := _PREFILL.search(line)) and (rate := float(found[2])) > 0:
            if (tokens := int(found[1])) >= _LARGE:
                beside.append(max(0.0, tokens / rate - every_pass) / tokens)
                if after:
                    second.append(beside[-1])
            after = True
        elif _DECODE.search(line):
            after = False
    if len(second) >= _FEWEST:
        return median(second)
    return float(np.quantile(beside, 0.1)) if beside else None


def _mean_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative, by least squares, since what takes longer now and then is part of the
    mean; without what takes twice as long as is usual: an engine rested."""
    start, rise = _slope(points)
    usual = [(n, seconds) for n, seconds in points if seconds <= 2 * (start + rise * n)]
    x, y = (np.array(column, dtype=np.float64) for column in zip(*usual, strict=True))
    (intercept, slope), *_ = np.linalg.lstsq(np.stack([np.ones_like(x), x], axis=1), y, rcond=None)
    if slope < 0 or not np.ptp(x):
        return float(y.mean()), 0.0
    return (float(intercept), float(slope)) if intercept >= 0 else (0.0, float(x @ y / (x @ x)))


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
