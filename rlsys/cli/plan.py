"""`rlsys plan`: forecasts for settings of a config, from simulations in virtual time."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from rlsys.cli.explain import with_gpu_memory
from rlsys.config import Config, add_config, load_config
from rlsys.convert.hub import pin_models
from rlsys.core.errors import RunError, UserError
from rlsys.core.machines import Machine, machines
from rlsys.planner.calibration import calibrate
from rlsys.planner.costs import Costs, estimate_costs
from rlsys.planner.duration import format_duration
from rlsys.planner.lengths import LengthDistribution, long_tail, read_trace
from rlsys.planner.memory import MEAN_PROMPT_TOKENS
from rlsys.planner.model_preflight import read_model
from rlsys.planner.settings import PER_NODE, Setting, settings, unchanged_setting
from rlsys.planner.simulation import Forecast, simulate

_COLUMNS: tuple[tuple[str, Callable[[Forecast], str]], ...] = (
    ("step", lambda f: format_duration(f.step_seconds)),
    ("rollout", lambda f: format_duration(f.rollout_seconds)),
    ("train", lambda f: format_duration(f.train_seconds)),
    ("push", lambda f: format_duration(f.push_seconds)),
    ("tokens/s", lambda f: f"{f.tokens_per_s:,.0f}"),
    ("slots idle", lambda f: f"{f.idle_slots:.0%}"),
    ("steps old", lambda f: f"{f.staleness:.1f}"),
    ("read again", lambda f: f"{f.recomputed:.2f}"),
    ("dropped", lambda f: f"{f.dropped:.0%}"),
)
"""Heading of each column, and the function that formats its value."""


def add_plan(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `rlsys plan`."""
    sub = add(
        "plan",
        plan,
        "forecast step time, tokens/s and idle slots of a config's settings, by simulating its rollout",
    )
    add_config(sub)
    sub.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs to try placements on (default: the config's own layout)",
    )
    sub.add_argument(
        "--gpu",
        choices=list(machines()),
        help="GPU type (default: h100 with the memory of launch.gpu_memory_gb)",
    )
    sub.add_argument(
        "--trace", type=Path, metavar="FILE",
        help='response lengths, JSON {"lengths": [...]} (default: a long tail up to rollout.max_response_tokens)',
    )  # fmt: skip
    sub.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN",
        help="measure costs and lengths on a run of this model and layout",
    )
    sub.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="length of each prompt (default: the calibration's, or 512)",
    )
    sub.add_argument(
        "--steps", type=int, default=8, metavar="N", help="number of train steps to average (default: 8)"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")


def plan(args: argparse.Namespace) -> int:
    """Run `rlsys plan`.

    Raises:
        UserError: an option is invalid, or no setting can run.
    """
    config = pin_models(load_config(args.config, args.overrides), weights=False)
    gpu = machines()[args.gpu or "h100"]
    if args.gpu is not None:
        config = with_gpu_memory(config, gpu.memory)
    gpu = replace(gpu, memory=config.launch.gpu_memory_gb)
    _check_options(args, config)
    basis = _basis(args, config, gpu)
    unchanged = [] if args.gpus else [unchanged_setting(config)]
    machine = None if args.calibrate else gpu
    candidates = [*unchanged, *settings(config, read_model(config), args.gpus, machine)]
    forecasts, rejected = _forecast_all(candidates, basis, args.steps)
    if not forecasts:
        raise UserError("; ".join(["no setting can run", *_grouped_by_reason(rejected)]))
    if args.json:
        entries = [{"name": s.name, **asdict(f)} for s, f in forecasts]
        print(
            json.dumps(
                {"settings": entries, "not_possible": rejected, "best": best(forecasts)[0].name}, indent=2
            )
        )
    else:
        _print(forecasts, rejected, _describe_basis(args, gpu, basis.lengths))
    return 0


def _forecast_all(
    candidates: Sequence[Setting | str], basis: _Basis, steps: int
) -> tuple[list[tuple[Setting, Forecast]], list[str]]:
    """Simulate settings.

    Args:
        candidates: settings, or `NAME: REASON` of settings that are not possible.
        basis: inputs of the simulations.
        steps: number of train steps to average.

    Returns:
        settings with their forecasts, and `NAME: REASON` of all other settings.
    """
    forecasts: list[tuple[Setting, Forecast]] = []
    rejected: list[str] = []
    for setting in candidates:
        if isinstance(setting, str):
            rejected.append(setting)
            continue
        print(f"rlsys: {setting.name}", file=sys.stderr, flush=True)
        try:
            by_tp = {tp: basis.costs(setting.config, tp) for tp in setting.config.engine.tps}
            with _quiet():
                forecast = simulate(
                    setting.config,
                    next(iter(by_tp.values())),
                    basis.lengths,
                    prompt_tokens=basis.prompt_tokens,
                    steps=steps,
                    by_tp=by_tp,
                )
        except RunError as e:
            rejected.append(f"{setting.name}: such a run would stop: {e}")
        else:
            forecasts.append((setting, forecast))
    return forecasts, rejected


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings of simulated runs."""
    logger = logging.getLogger("rlsys")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class _Basis:
    """Inputs of the simulations.

    Attributes:
        costs: (config of a setting, tensor-parallel size of its engines) -> costs.
        lengths: distribution of the response lengths.
        prompt_tokens: length of each prompt.
    """

    costs: Callable[[Config, int], Costs]
    lengths: LengthDistribution
    prompt_tokens: int


def _check_options(args: argparse.Namespace, config: Config) -> None:
    """Check the options of `rlsys plan`.

    Raises:
        UserError: an option is invalid, or does not fit the config.
    """
    for name, minimum in (("gpus", 1), ("prompt_tokens", 1), ("steps", 1)):
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {minimum} or more")
    if args.gpus is not None and args.gpus > PER_NODE and args.gpus % PER_NODE:
        raise UserError(f"--gpus {args.gpus}: expected at most {PER_NODE}, or a multiple of {PER_NODE}")
    if args.gpus is not None and (pools := config.engine.pools):
        raise UserError(
            f"--gpus {args.gpus} and engine.pools = {', '.join(p.name for p in pools)}: --gpus lays out equal "
            "engines; omit --gpus to plan the pools, or add 'engine.pools=[]' engine.count=N"
        )
    if args.calibrate is not None and args.gpus is not None:
        raise UserError(
            f"--calibrate {args.calibrate} and --gpus {args.gpus}: expected only one of them, because a run shows "
            "only the costs of its own layout"
        )
    if args.calibrate is None and args.gpus is None and not config.launch.gpus_per_node:
        raise UserError(
            "launch.gpus_per_node = 0: expected --gpus N, or --calibrate RUN with a run of this machine"
        )


def _basis(args: argparse.Namespace, config: Config, machine: Machine) -> _Basis:
    """Return the inputs of the simulations: measured on the run of --calibrate, or else estimated for `machine`.

    Raises:
        UserError: the file of --trace or the run of --calibrate cannot be used.
    """
    max_tokens = config.rollout.max_response_tokens
    trace = read_trace(args.trace, max_tokens) if args.trace else None
    if args.calibrate is not None:
        with _quiet():
            calibration = calibrate(args.calibrate)
        return _Basis(
            lambda _, tp: calibration.costs(tp),
            trace or calibration.lengths.truncate(max_tokens),
            args.prompt_tokens or calibration.prompt_tokens,
        )
    hf = read_model(config)
    return _Basis(
        lambda setting_config, tp: estimate_costs(setting_config, hf, machine, tp),
        trace or long_tail(max_tokens),
        args.prompt_tokens or MEAN_PROMPT_TOKENS,
    )


def best(forecasts: Sequence[tuple[Setting, Forecast]]) -> tuple[Setting, Forecast]:
    """Return the setting with the most trained tokens per second, and its forecast."""
    return max(forecasts, key=lambda entry: entry[1].tokens_per_s)


def reason(forecasts: Sequence[tuple[Setting, Forecast]]) -> str:
    """Return a text that compares the best setting with the first one."""
    best_setting, best_forecast = best(forecasts)
    first_setting, first_forecast = forecasts[0]
    if best_setting is first_setting:
        return f"best: {best_setting.name}: no other setting trains more tokens per second"
    reasons = [f"slots idle {best_forecast.idle_slots:.0%} instead of {first_forecast.idle_slots:.0%}"]
    if first_forecast.rollout_seconds > best_forecast.rollout_seconds:
        reasons.append(
            f"the trainer waits {format_duration(best_forecast.rollout_seconds)} per step instead of "
            f"{format_duration(first_forecast.rollout_seconds)}"
        )
    speedup = best_forecast.tokens_per_s / first_forecast.tokens_per_s
    text = (
        f"best: {best_setting.name}: {speedup:.2f} times the tokens per second of '{first_setting.name}': "
        f"{', '.join(reasons)}"
    )
    if best_forecast.staleness:
        text += f"; a group's oldest token is {best_forecast.staleness:.1f} steps old on average"
    return text


def _describe_basis(args: argparse.Namespace, machine: Machine, lengths: LengthDistribution) -> str:
    """Return a text about the sources of costs and response lengths."""
    if args.calibrate is not None:
        return f"costs measured on {args.calibrate}; mean response length {lengths.mean:.0f} tokens"
    tail = "" if args.trace else " (assumed: a long tail; use --trace for your own)"
    return f"{args.gpu or 'h100'} ({machine.source}); mean response length {lengths.mean:.0f} tokens{tail}"


def _print(forecasts: Sequence[tuple[Setting, Forecast]], rejected: Sequence[str], basis: str) -> None:
    """Print the table of forecasts, the pools, the best setting, and the settings that are not possible.

    `basis`: text about the inputs of the simulations.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for setting, forecast in forecasts:
        table.add_row(setting.name, *(format_value(forecast) for _, format_value in _COLUMNS))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)
    print()
    for setting, forecast in forecasts:
        if forecast.pools:
            pool_texts = (
                f"{name} {pool.tokens:.0%} of the tokens, {pool.cost:.3g} a million trained ones"
                for name, pool in forecast.pools.items()
            )
            print(f"pools: {setting.name}: {'; '.join(pool_texts)}")
    print(reason(forecasts))
    print(f"from: {basis}")
    for line in _grouped_by_reason(rejected):
        print(f"not possible: {line}")


def _grouped_by_reason(rejected: Sequence[str]) -> list[str]:
    """Return one line per reason, with the first setting that it excludes and the number of others.

    `rejected`: `NAME: REASON` of each setting.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for line in rejected:
        name, _, cause = line.partition(": ")
        names[cause].append(name)
    lines = []
    for cause, setting_names in names.items():
        rest_note = f" and {len(setting_names) - 1} more" if len(setting_names) > 1 else ""
        lines.append(f"{setting_names[0]}{rest_note}: {cause}")
    return lines
