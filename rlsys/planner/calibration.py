"""Costs measured on a run of this installation: from its metrics, and from SGLang's log lines about batches."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
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
_MIN_PREFILL_TOKENS = 64
"""Smallest number of tokens of a prefill batch whose duration depends mainly on the tokens, not on the pass."""
_MIN_POINTS = 5
"""Smallest number of decode log lines, and of train steps, for a calibration."""
_FIT_ROUNDS = 4
"""Number of simulations of the fit in `_fit_overheads`."""
_FIT_STEPS = 12
"""Number of train steps of each simulation."""
_DAMPING = 0.7
"""Share of the remaining error that a round of the fit corrects."""


@dataclass(frozen=True)
class Calibration:
    """Measured costs of a run, for its machine and layout.

    Attributes:
        by_tp: Tensor-parallel size of an engine -> costs.
        lengths: Response lengths.
        prompt_tokens: Mean prompt length in tokens.
    """

    by_tp: dict[int, Costs]
    lengths: LengthDistribution
    prompt_tokens: int

    def costs(self, tp: int) -> Costs:
        """Return the costs of engines with tensor-parallel size `tp`.

        Raises:
            UserError: the run had no engine of this size.
        """
        if tp not in self.by_tp:
            sizes = ", ".join(map(str, sorted(self.by_tp)))
            raise UserError(f"engine.tp = {tp}: expected a size of an engine of the --calibrate run, {sizes}")
        return self.by_tp[tp]


def calibrate(run: Path) -> Calibration:
    """Measure the costs of a run.

    Args:
        run: folder of the run.

    Raises:
        UserError: the run has too few train steps or log lines.
    """
    steps = read_metrics(run).steps
    if len(steps) < _MIN_POINTS:
        raise UserError(f"--calibrate {run}: {len(steps)} train steps; expected at least {_MIN_POINTS}")
    groups = RunReader(run).lengths()
    prompts = [length.prompt for group in groups for length in group if length.prompt is not None]
    # Without a known length, every prompt was prefilled more than once.
    prompt_tokens = round(fmean(prompts)) if prompts else MEAN_PROMPT_TOKENS
    config = load_run_config(run)
    later = steps[1:]  # the first step compiles
    train_step, trained_token = _train_costs(later, prompt_tokens * config.samples_per_step)
    by_tp = {}
    for tp in config.engine.tps:
        lines = _log_lines(run, config, tp)
        pass_overhead, decoded_token = _decode_costs(run, lines)
        prompt_token = _prefill_cost(lines, pass_overhead)
        by_tp[tp] = Costs(
            pass_overhead=pass_overhead,
            decoded_token=decoded_token,
            prompt_token=decoded_token if prompt_token is None else prompt_token,
            trained_token=trained_token,
            shared_prompts=any(_shared_share(step) for step in later),
            train_step=train_step,
        )
    calibration = Calibration(by_tp, lengths_of(groups), prompt_tokens)
    rollout_seconds = fmean(_without_outliers([step["time_rollout"] for step in later]))
    push_seconds = fmean(_without_outliers([step["time_sync"] for step in later]))
    return _fit_overheads(config, calibration, rollout_seconds, push_seconds)


def _train_costs(steps: Sequence[Mapping[str, float]], prompt_tokens: int) -> tuple[float, float]:
    """Return the overhead of a train step and the seconds of a trained token, by a fit over train steps.

    Args:
        steps: metrics of the steps.
        prompt_tokens: number of prompt tokens of a step.
    """
    points = [
        ((step["tokens"] + prompt_tokens) * (1 - _shared_share(step)), step["time_train"]) for step in steps
    ]
    return _slope(points)


def _shared_share(step: Mapping[str, float]) -> float:
    """Return the share of a step's tokens whose computation samples shared; 0 for runs without this metric."""
    return step.get("shared_share", 0.0)


def _without_outliers(seconds: Sequence[float]) -> list[float]:
    """Return the values in ascending order without the largest tenth: checkpoints, evaluations and pauses."""
    return sorted(seconds)[: max(1, math.ceil(0.9 * len(seconds)))]


def _fit_overheads(
    config: Config, calibration: Calibration, rollout_seconds: float, push_seconds: float
) -> Calibration:
    """Fit the costs that no log contains, so that a simulation of the run reproduces its times.

    These costs are an engine's overhead per request, and the time of a push.

    Args:
        config: config of the run.
        calibration: the other costs.
        rollout_seconds: seconds per step in which the trainer waited for groups.
        push_seconds: seconds of a push.

    Returns:
        The calibration with all costs.
    """
    requests = config.slots / config.engine.writers
    for _ in range(_FIT_ROUNDS):
        by_tp = calibration.by_tp
        simulated = simulate(
            config,
            next(iter(by_tp.values())),
            calibration.lengths,
            prompt_tokens=calibration.prompt_tokens,
            steps=_FIT_STEPS,
            by_tp=by_tp,
        )
        request_error = rollout_seconds - simulated.rollout_seconds
        push_error = push_seconds - simulated.push_seconds
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
    """Return the response lengths of the newest half of the groups, because lengths change while a policy learns.

    An unfinished response gets the length of a random longer finished response. Without unfinished responses, the
    distribution would lack the long responses that were in flight when the run stopped.

    Args:
        groups: length of each response of each group, in the order of the groups' start.
    """
    newest = groups[len(groups) // 2 :]
    rng = random.Random(0)
    finished = sorted(length.tokens for group in newest for length in group if length.complete)
    longest = max((length.tokens for group in newest for length in group), default=1)

    def final_tokens(length: Length) -> int:
        """Return the number of tokens of a response at its end."""
        if length.complete:
            return length.tokens
        longer = finished[int(np.searchsorted(finished, length.tokens, side="right")) :]
        return rng.choice(longer or [longest])

    newest_lengths = [[final_tokens(length) for length in group] for group in newest]
    return LengthDistribution(
        [n for group in newest_lengths for n in group] or [1], longest, newest_lengths or None
    )


def _log_lines(run: Path, config: Config, tp: int) -> list[str]:
    """Return the log lines of the engines with tensor-parallel size `tp`.

    Engines that joined during the run have the size engine.tp.
    """
    lines = []
    for log in sorted((run / "logs").glob("engine-*.log")):
        index = int(match[1]) if (match := re.search(r"engine-(\d+)", log.name)) else 0
        if config.engine.tp_of(index) == tp:
            lines += log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines


def _decode_costs(run: Path, lines: Iterable[str]) -> tuple[float, float]:
    """Return the overhead of a decode pass, and the seconds of each request in it.

    SGLang logs a line every 40 passes, which covers the time since the previous line. The fit uses the lines without
    a prefill in this time if there are enough, else all lines.

    Args:
        run: folder of the run, for messages.
        lines: log lines of engines.

    Raises:
        UserError: the log has too few lines about decoding.
    """
    all_points: list[tuple[float, float]] = []
    decode_only_points: list[tuple[float, float]] = []
    had_prefill = True
    for line in lines:
        if (match := _DECODE.search(line)) and (rate := float(match[2])) > 0:
            point = float(match[1]), int(match[1]) / rate
            all_points.append(point)
            if not had_prefill:
                decode_only_points.append(point)
            had_prefill = False
        elif _PREFILL.search(line):
            had_prefill = True
    if len(all_points) < _MIN_POINTS:
        raise UserError(
            f"--calibrate {run}: logs/engine-*.log have {len(all_points)} lines about decoding; expected at least "
            f"{_MIN_POINTS}"
        )
    return _mean_line(decode_only_points) if len(decode_only_points) >= _MIN_POINTS else _slope(all_points)


def _prefill_cost(lines: Iterable[str], pass_overhead: float) -> float | None:
    """Return the seconds of a prompt token without the overhead of its pass; None without log lines.

    A log line covers the time since the previous batch. The result is the median over batches that directly follow
    another prefill batch if there are enough, else the 0.1 quantile over all batches.

    Args:
        lines: log lines of engines.
        pass_overhead: seconds of a pass.
    """
    all_seconds: list[float] = []
    following_seconds: list[float] = []
    follows_prefill = False
    for line in lines:
        if (match := _PREFILL.search(line)) and (rate := float(match[2])) > 0:
            if (tokens := int(match[1])) >= _MIN_PREFILL_TOKENS:
                all_seconds.append(max(0.0, tokens / rate - pass_overhead) / tokens)
                if follows_prefill:
                    following_seconds.append(all_seconds[-1])
            follows_prefill = True
        elif _DECODE.search(line):
            follows_prefill = False
    if len(following_seconds) >= _MIN_POINTS:
        return median(following_seconds)
    return float(np.quantile(all_seconds, 0.1)) if all_seconds else None


def _mean_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, both at least 0, by least squares without outliers.

    Least squares fit the mean, which includes occasional slow passes. Points with more than twice the seconds of a
    robust fit are outliers, because the engine was paused.

    Args:
        points: (number of requests, seconds) of each log line.
    """
    robust_intercept, robust_slope = _slope(points)
    inliers = [(n, seconds) for n, seconds in points if seconds <= 2 * (robust_intercept + robust_slope * n)]
    x, y = (np.array(column, dtype=np.float64) for column in zip(*inliers, strict=True))
    (intercept, slope), *_ = np.linalg.lstsq(np.stack([np.ones_like(x), x], axis=1), y, rcond=None)
    if slope < 0 or not np.ptp(x):
        return float(y.mean()), 0.0
    return (float(intercept), float(slope)) if intercept >= 0 else (0.0, float(x @ y / (x @ x)))


def _slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of points (x, y), both at least 0, by the Theil-Sen estimator.

    The estimator tolerates outliers.
    """
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
