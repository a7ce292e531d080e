"""Costs measured on an own run: from its metrics, and from SGLang's log lines about batches."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from rlsys.config import Config, load_run_config
from rlsys.core.errors import UserError
from rlsys.ledger.reader import Length, RunReader
from rlsys.obs.metrics import read_metrics
from rlsys.planner.costs import Costs
from rlsys.planner.lengths import LengthDistribution
from rlsys.planner.memory import MEAN_PROMPT_TOKENS
from rlsys.planner.simulation import simulate

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)")
_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+),.*?input throughput \(token/s\): ([\d.]+)")
_LARGE = 64
"""Minimum tokens of a prefill batch whose throughput depends on the tokens rather than on the pass."""
_MIN_POINTS = 5
"""Minimum number of decode log lines, or of train steps, for a calibration."""
_ROUNDS, _STEPS, _DAMPING = 4, 12, 0.7
"""Fit of the remaining costs: number of simulations, their train steps, and the damping of each correction."""


@dataclass(frozen=True)
class Calibration:
    """Measured costs of a run, for its machine and layout."""

    by_tp: dict[int, Costs]
    """Tensor-parallel size of an engine -> costs."""
    lengths: LengthDistribution
    prompt_tokens: int
    """Mean prompt length."""

    def costs(self, tp: int) -> Costs:
        """Return the costs of engines of a size.

        Raises:
            UserError: the run had no such engine.
        """
        if tp not in self.by_tp:
            sizes = ", ".join(map(str, sorted(self.by_tp)))
            raise UserError(
                f"--calibrate: the run's engines have tp {sizes}, so the costs of tp {tp} are unknown"
            )
        return self.by_tp[tp]


def calibrate(run: Path) -> Calibration:
    """Measure the costs of a run.

    Raises:
        UserError: the run folder has too little data.
    """
    steps = read_metrics(run).steps
    if len(steps) < _MIN_POINTS:
        raise UserError(f"--calibrate {run}: {len(steps)} train steps; expected at least {_MIN_POINTS}")
    groups = RunReader(run).lengths()
    lengths = lengths_of(groups)
    prompts = [length.prompt for group in groups for length in group if length.prompt is not None]
    prompt = (
        round(fmean(prompts)) if prompts else MEAN_PROMPT_TOKENS
    )  # every prompt was prefilled more than once
    config = load_run_config(run)
    later = steps[1:]  # the first step compiles
    shares = [s.get("shared_share", 0.0) for s in later]  # of a run of an older rlsys, nothing is shared
    tokens = [s["tokens"] + prompt * config.samples_per_step for s in later]
    computed = [n * (1 - share) for n, share in zip(tokens, shares, strict=True)]
    step, token = _slope(list(zip(computed, (s["time_train"] for s in later), strict=True)))
    by_tp = {}
    for tp in config.engine.tps:
        lines = _log_lines(run, config, tp)
        every_pass, decoded = _decoding(run, lines)
        read = _prefill(lines, every_pass)
        by_tp[tp] = Costs(
            pass_overhead=every_pass,
            decoded_token=decoded,
            prompt_token=decoded if read is None else read,
            trained_token=token,
            shared_prompts=any(shares),
            train_step=step,
        )
    rollout_seconds, push_seconds = (
        fmean(_without_outliers([s[name] for s in later])) for name in ("time_rollout", "time_sync")
    )
    return _fit_overheads(config, Calibration(by_tp, lengths, prompt), rollout_seconds, push_seconds)


def _without_outliers(seconds: Sequence[float]) -> list[float]:
    """Return the values without the largest tenth, which includes checkpoints, evaluations and pauses."""
    return sorted(seconds)[: max(1, math.ceil(0.9 * len(seconds)))]


def _fit_overheads(
    config: Config, calibration: Calibration, rollout_seconds: float, push_seconds: float
) -> Calibration:
    """Fit the costs that no log contains, so that a simulation of the run reproduces its times.

    These are an engine's overhead per request, and the time of a push.

    Args:
        config: the run's config.
        calibration: the other costs.
        rollout_seconds: the run's waiting time per step.
        push_seconds: the run's push time per step.
    """
    requests = config.slots / config.engine.writers
    for _ in range(_ROUNDS):
        by_tp = calibration.by_tp
        simulated = simulate(
            config,
            next(iter(by_tp.values())),
            calibration.lengths,
            prompt_tokens=calibration.prompt_tokens,
            steps=_STEPS,
            by_tp=by_tp,
        )
        request_error, push_error = (
            rollout_seconds - simulated.rollout_seconds,
            push_seconds - simulated.push_seconds,
        )
        fitted = {
            tp: replace(
                costs,
                request=max(0.0, costs.request + _DAMPING * request_error / requests),
                push=max(0.0, costs.push + push_error),
            )
            for tp, costs in by_tp.items()
        }
        calibration = replace(calibration, by_tp=fitted)
    return calibration


def lengths_of(groups: Sequence[Sequence[Length]]) -> LengthDistribution:
    """Return the lengths of the newest half of the groups, since lengths change while a policy learns.

    An unfinished response is assumed to have the length of a random finished one that is longer. Without unfinished
    responses, a run that stopped with long responses in flight would have short ones only.
    """
    newest, rng = groups[len(groups) // 2 :], random.Random(0)
    finished = sorted(length.tokens for group in newest for length in group if length.complete)
    longest = max((length.tokens for group in newest for length in group), default=1)

    def final_tokens(length: Length) -> int:
        longer = (
            finished
            if length.complete
            else finished[int(np.searchsorted(finished, length.tokens, side="right")) :]
        )
        return length.tokens if length.complete else rng.choice(longer or [longest])

    newest_lengths = [[final_tokens(length) for length in group] for group in newest]
    return LengthDistribution(
        [n for group in newest_lengths for n in group] or [1], longest, newest_lengths or None
    )


def _log_lines(run: Path, config: Config, tp: int) -> list[str]:
    """Return the log lines of the engines of this size; engines that joined later count as engine.tp."""
    lines = []
    for log in sorted((run / "logs").glob("engine-*.log")):
        index = int(match[1]) if (match := re.search(r"engine-(\d+)", log.name)) else 0
        if config.engine.tp_of(index) == tp:
            lines += log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines


def _decoding(run: Path, lines: Iterable[str]) -> tuple[float, float]:
    """Return the seconds of a decode pass, and of each request in it, from the log lines of every 40 passes.

    If possible, only lines without a prefill since the previous line are used, since a line covers the time
    between two lines.
    """
    all_lines: list[tuple[float, float]] = []
    decoding: list[tuple[float, float]] = []
    prompts = True
    for line in lines:
        if (match := _DECODE.search(line)) and (rate := float(match[2])) > 0:
            point = float(match[1]), int(match[1]) / rate
            all_lines.append(point)
            if not prompts:
                decoding.append(point)
            prompts = False
        elif _PREFILL.search(line):
            prompts = True
    if len(all_lines) < _MIN_POINTS:
        raise UserError(
            f"--calibrate {run}: logs/engine-*.log: fewer than {_MIN_POINTS} lines about decoding"
        )
    return _mean_line(decoding) if len(decoding) >= _MIN_POINTS else _slope(all_lines)


def _prefill(lines: Iterable[str], every_pass: float) -> float | None:
    """Return the seconds of a prompt token besides those of its pass.

    It is the median over batches directly after another batch, if there are enough, since a line covers the
    time from one batch to the next; else the fastest tenth of all.
    """
    token_seconds: list[float] = []
    second: list[float] = []
    follows_prefill = False
    for line in lines:
        if (match := _PREFILL.search(line)) and (rate := float(match[2])) > 0:
            if (tokens := int(match[1])) >= _LARGE:
                token_seconds.append(max(0.0, tokens / rate - every_pass) / tokens)
                if follows_prefill:
                    second.append(token_seconds[-1])
            follows_prefill = True
        elif _DECODE.search(line):
            follows_prefill = False
    if len(second) >= _MIN_POINTS:
        return median(second)
    return float(np.quantile(token_seconds, 0.1)) if token_seconds else None


def _mean_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, neither negative, by least squares without outliers.

    Least squares fit the mean, which includes occasional slow passes. Points that take twice the usual time
    are dropped: the engine was paused.
    """
    start, rise = _slope(points)
    usual = [(n, seconds) for n, seconds in points if seconds <= 2 * (start + rise * n)]
    x, y = (np.array(column, dtype=np.float64) for column in zip(*usual, strict=True))
    (intercept, slope), *_ = np.linalg.lstsq(np.stack([np.ones_like(x), x], axis=1), y, rcond=None)
    if slope < 0 or not np.ptp(x):
        return float(y.mean()), 0.0
    return (float(intercept), float(slope)) if intercept >= 0 else (0.0, float(x @ y / (x @ x)))


def _slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, neither negative, by the Theil-Sen estimator, which tolerates outliers."""
    x, y = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    first, second = np.triu_indices(len(x), 1)
    differs = x[first] != x[second]
    if not differs.any():
        return float(np.median(y)), 0.0
    slopes = (y[second] - y[first])[differs] / (x[second] - x[first])[differs]
    slope = max(0.0, float(np.median(slopes)))
    intercept = float(np.median(y - slope * x))
    if intercept < 0:
        return 0.0, float(np.median(y / x))
    return intercept, slope
