"""`rlsys plan`: forecasts for settings of a config, by simulation in virtual time."""

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


def add_plan(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `rlsys plan`. `add` creates a sub-command from name, function and help."""
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
    """Run `rlsys plan`."""
    config = pin_models(load_config(args.config, args.overrides), weights=False)
    gpu = machines()[args.gpu or "h100"]
    if args.gpu is not None:
        config = with_gpu_memory(config, gpu.memory)
    gpu = replace(gpu, memory=config.launch.gpu_memory_gb)
    basis = _basis(args, config, gpu)
    hf = read_model(config)
    machine = None if args.calibrate else gpu
    forecasts: list[tuple[Setting, Forecast]] = []
    rejected: list[str] = []
    unchanged = [] if args.gpus else [unchanged_setting(config)]
    for setting in [*unchanged, *settings(config, hf, args.gpus, machine)]:
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
                    steps=args.steps,
                    by_tp=by_tp,
                )
        except RunError as e:
            rejected.append(f"{setting.name}: such a run would stop: {e}")
        else:
            forecasts.append((setting, forecast))
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
        _print(forecasts, rejected, _assumed(args, gpu, basis.lengths))
    return 0


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
    """Inputs of the simulations. `costs`: costs of a setting with engines of this tp."""

    costs: Callable[[Config, int], Costs]
    lengths: LengthDistribution
    prompt_tokens: int


def _basis(args: argparse.Namespace, config: Config, machine: Machine) -> _Basis:
    """Return the inputs of the simulations.

    Raises:
        UserError: an option is invalid.
    """
    for name, minimum in (("gpus", 1), ("prompt_tokens", 1), ("steps", 1)):
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {minimum} or more")
    if args.gpus is not None and args.gpus > PER_NODE and args.gpus % PER_NODE:
        raise UserError(f"--gpus {args.gpus}: expected at most {PER_NODE}, or whole nodes of {PER_NODE}")
    if args.gpus is not None and (pools := config.engine.pools):
        raise UserError(
            f"--gpus {args.gpus} and engine.pools = {', '.join(p.name for p in pools)}: --gpus lays out equal "
            "engines; omit --gpus to plan the pools, or add 'engine.pools=[]' engine.count=N"
        )
    cap = config.rollout.max_response_tokens
    trace = read_trace(args.trace, cap) if args.trace else None
    if args.calibrate is not None:
        if args.gpus is not None:
            raise UserError(
                "--calibrate and --gpus: a run shows the costs of its own layout only; use one of them"
            )
        with _quiet():
            calibration = calibrate(args.calibrate)
        prompt = args.prompt_tokens or calibration.prompt_tokens
        return _Basis(lambda _, tp: calibration.costs(tp), trace or calibration.lengths.truncate(cap), prompt)
    if args.gpus is None and not config.launch.gpus_per_node:
        raise UserError("the config has no GPUs: add --gpus N, or --calibrate RUN with a run of this machine")
    hf = read_model(config)
    prompt = args.prompt_tokens or MEAN_PROMPT_TOKENS
    return _Basis(
        lambda setting_config, tp: estimate_costs(setting_config, hf, machine, tp),
        trace or long_tail(cap),
        prompt,
    )


def best(forecasts: Sequence[tuple[Setting, Forecast]]) -> tuple[Setting, Forecast]:
    """Return the setting with most trained tokens per second."""
    return max(forecasts, key=lambda entry: entry[1].tokens_per_s)


def reason(forecasts: Sequence[tuple[Setting, Forecast]]) -> str:
    """Explain the best setting, relative to the first one."""
    (setting, top), (first, base) = best(forecasts), forecasts[0]
    if setting is first:
        return f"best: {setting.name}: no other setting trains more tokens per second"
    reasons = [f"slots idle {top.idle_slots:.0%} instead of {base.idle_slots:.0%}"]
    if base.rollout_seconds > top.rollout_seconds:
        reasons.append(
            f"the trainer waits {format_duration(top.rollout_seconds)} per step instead of "
            f"{format_duration(base.rollout_seconds)}"
        )
    price = f"; a group's oldest token is {top.staleness:.1f} steps old on average" if top.staleness else ""
    return (
        f"best: {setting.name}: {top.tokens_per_s / base.tokens_per_s:.2f} times the tokens per second of "
        f"'{first.name}': {', '.join(reasons)}{price}"
    )


def _assumed(args: argparse.Namespace, machine: Machine, lengths: LengthDistribution) -> str:
    if args.calibrate is not None:
        return f"costs measured on {args.calibrate}; mean response length {lengths.mean:.0f} tokens"
    tail = "" if args.trace else " (assumed: a long tail; use --trace for your own)"
    return f"{args.gpu or 'h100'} ({machine.source}); mean response length {lengths.mean:.0f} tokens{tail}"


def _print(forecasts: Sequence[tuple[Setting, Forecast]], rejected: Sequence[str], assumed: str) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for setting, forecast in forecasts:
        table.add_row(setting.name, *(of(forecast) for _, of in _COLUMNS))
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
    print(f"from: {assumed}")
    for line in _grouped_by_reason(rejected):
        print(f"not possible: {line}")


def _grouped_by_reason(rejected: Sequence[str]) -> list[str]:
    """Return one line per reason, with the settings that it excludes."""
    names: dict[str, list[str]] = defaultdict(list)
    for line in rejected:
        name, _, cause = line.partition(": ")
        names[cause].append(name)
    lines = []
    for cause, setting_names in names.items():
        rest_note = f" and {len(setting_names) - 1} more" if len(setting_names) > 1 else ""
        lines.append(f"{setting_names[0]}{rest_note}: {cause}")
    return lines
