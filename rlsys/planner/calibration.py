"""Costs as a run of one's own shows them: its metrics, and what SGLang logs of its batches."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from rlsys.config import Config, load_config
from rlsys.errors import UserError
from rlsys.obs.metrics import read_metrics
from rlsys.planner.costs import Costs
from rlsys.planner.lengths import Lengths
from rlsys.rollout.canaries import CANARIES
from rlsys.rollout.reader import Length, RunReader

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)")
_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+),.*?input throughput \(token/s\): ([\d.]+)")
_LARGE = 64
"""Tokens of a prefill batch from which its throughput tells of tokens, not of the pass."""
_FEWEST = 5
"""Lines about decoding, or steps, from which something can be told."""
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
    pushed = median(s["time_sync"] for s in later)
    by_tp = {}
    for tp in config.engine.tps:
        lines = _log_lines(run, config, tp)
        every_pass, decoded = _decoding(run, lines)
        read = _prefill(lines, every_pass)
        prompt_token = decoded if read is None else read
        # A push ends with a pass over the canaries, which the simulation has of its own.
        canaries = every_pass + CANARIES * (2 * prompt + max(lengths.values)) * prompt_token
        by_tp[tp] = Costs(
            every_pass=every_pass,
            decoded_token=decoded,
            prompt_token=prompt_token,
            trained_token=token,
            train_step=step,
            push=max(0.0, pushed - canaries),
        )
    return Calibration(by_tp, lengths, prompt)


def lengths_of(groups: Sequence[Sequence[Length]]) -> Lengths:
    """Of the newest half of the groups, since lengths change while a policy learns.

    A response that had not ended is taken to end as one that ended later than it had come: without these, a run that
    is stopped with long responses in flight would show short ones only.
    """
    newest, rng = groups[len(groups) // 2 :], random.Random(0)
    ended = sorted(one.tokens for group in newest for one in group if one.ended)
    longest = max((one.tokens for group in newest for one in group), default=1)

    def whole(one: Length) -> int:
        longer = ended if one.ended else ended[int(np.searchsorted(ended, one.tokens, side="right")) :]
        return one.tokens if one.ended else rng.choice(longer or [longest])

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
    """Seconds of a pass, and of each request in it, from what the engine logs every 40 passes."""
    by_running: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        if (found := _DECODE.search(line)) and (rate := float(found[2])) > 0:
            by_running[int(found[1])].append(int(found[1]) / rate)
    if sum(map(len, by_running.values())) < _FEWEST:
        raise UserError(f"--calibrate {run}: logs/engine-*.log: fewer than {_FEWEST} lines about decoding")
    return _slope([(n, seconds) for n, each in by_running.items() for seconds in each])


def _prefill(lines: Iterable[str], every_pass: float) -> float | None:
    """Seconds of a prompt's token, beside those of its pass: of the fastest tenth, since the others count the time
    between two batches."""
    found = [(int(f[1]), float(f[2])) for line in lines if (f := _PREFILL.search(line))]
    beside = [
        max(0.0, tokens / rate - every_pass) / tokens
        for tokens, rate in found
        if tokens >= _LARGE and rate > 0
    ]
    return float(np.quantile(beside, 0.1)) if beside else None


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
