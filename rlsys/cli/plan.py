"""The command `rlsys plan`: what settings of a config would do, by simulation in virtual time."""

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

from rich.console import Console
from rich.table import Table

from rlsys.config import Config, add_config, load_config
from rlsys.core.errors import RunError, UserError
from rlsys.core.machines import machines
from rlsys.planner.calibration import calibrate
from rlsys.planner.costs import Costs, estimate_costs
from rlsys.planner.duration import format_duration
from rlsys.planner.lengths import LengthDistribution, long_tail, read_trace
from rlsys.planner.model_preflight import read_model
from rlsys.planner.settings import PER_NODE, Setting, settings, unchanged_setting
from rlsys.planner.simulation import Forecast, simulate

_PROMPT_TOKENS = 512

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
    """`add` makes a sub-command: name, function, help."""
    sub = add(
        "plan",
        plan,
        "forecast step time, tokens a second and idle slots of a config's settings, by simulating its rollout",
    )
    add_config(sub)
    sub.add_argument("--gpus", type=int, metavar="N", help="try placements of so many; else the config's own")
    sub.add_argument("--gpu", choices=list(machines()), default="h100", help="which kind; h100")
    sub.add_argument(
        "--trace", type=Path, metavar="FILE",
        help='response lengths, JSON {"lengths": [...]}; else a long tail up to rollout.max_response_tokens',
    )  # fmt: skip
    sub.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN",
        help="take costs and lengths from a run of this model and layout",
    )
    sub.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="of each prompt; as the calibration has them, or 512"
    )
    sub.add_argument("--steps", type=int, default=8, metavar="N", help="train steps that are averaged; 8")
    sub.add_argument("--json", action="store_true", help="print the figures as JSON")


def plan(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides)
    basis = _basis(args, config)
    hf = read_model(config)
    machine = None if args.calibrate else machines()[args.gpu]
    tried: list[tuple[Setting, Forecast]] = []
    against: list[str] = []
    own = [] if args.gpus else [unchanged_setting(config)]
    for setting in [*own, *settings(config, hf, args.gpus, machine)]:
        if isinstance(setting, str):
            against.append(setting)
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
            against.append(f"{setting.name}: such a run stops: {e}")
        else:
            tried.append((setting, forecast))
    if not tried:
        raise UserError("; ".join(["no setting can run", *_folded(against)]))
    if args.json:
        told = [{"name": s.name, **asdict(f)} for s, f in tried]
        print(json.dumps({"settings": told, "not_possible": against, "best": best(tried)[0].name}, indent=2))
    else:
        _print(tried, against, _assumed(args, basis.lengths))
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """A simulated run's warnings are not about a run of anybody."""
    logger = logging.getLogger("rlsys")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class _Basis:
    """What settings are simulated with. `costs`: of a setting, with engines of this tp."""

    costs: Callable[[Config, int], Costs]
    lengths: LengthDistribution
    prompt_tokens: int


def _basis(args: argparse.Namespace, config: Config) -> _Basis:
    """Raises UserError."""
    for name, least in (("gpus", 1), ("prompt_tokens", 1), ("steps", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    if args.gpus is not None and args.gpus > PER_NODE and args.gpus % PER_NODE:
        raise UserError(f"--gpus {args.gpus}: expected at most {PER_NODE}, or whole nodes of {PER_NODE}")
    if args.gpus is not None and (pools := config.engine.pools):
        raise UserError(
            f"--gpus {args.gpus} and engine.pools = {', '.join(p.name for p in pools)}: engines that are alike are "
            "laid out; leave --gpus out to plan the pools as they are, or give 'engine.pools=[]' engine.count=N"
        )
    cap = config.rollout.max_response_tokens
    trace = read_trace(args.trace, cap) if args.trace else None
    if args.calibrate is not None:
        if args.gpus is not None:
            raise UserError(
                "--calibrate and --gpus: a run tells the costs of its own layout only; give one of them"
            )
        with _quiet():
            found = calibrate(args.calibrate)
        prompt = args.prompt_tokens or found.prompt_tokens
        return _Basis(lambda _, tp: found.costs(tp), trace or found.lengths.truncate(cap), prompt)
    if args.gpus is None and not config.launch.gpus_per_node:
        raise UserError("a config without GPUs: give --gpus N, or --calibrate RUN with a run of this machine")
    hf, machine = read_model(config), machines()[args.gpu]
    prompt = args.prompt_tokens or _PROMPT_TOKENS
    return _Basis(lambda made, tp: estimate_costs(made, hf, machine, tp), trace or long_tail(cap), prompt)


def best(tried: Sequence[tuple[Setting, Forecast]]) -> tuple[Setting, Forecast]:
    """Most trained tokens a second."""
    return max(tried, key=lambda one: one[1].tokens_per_s)


def reason(tried: Sequence[tuple[Setting, Forecast]]) -> str:
    """Why the best one is, against the first that was tried."""
    (setting, top), (first, base) = best(tried), tried[0]
    if setting is first:
        return f"best: {setting.name}: nothing that was tried trains more tokens a second"
    why = [f"slots idle {top.idle_slots:.0%} instead of {base.idle_slots:.0%}"]
    if base.rollout_seconds > top.rollout_seconds:
        why.append(
            f"the trainer waits {format_duration(top.rollout_seconds)} a step instead of "
            f"{format_duration(base.rollout_seconds)}"
        )
    price = f"; a group's oldest token is {top.staleness:.1f} steps old on average" if top.staleness else ""
    return (
        f"best: {setting.name}: {top.tokens_per_s / base.tokens_per_s:.2f} times the tokens a second of "
        f"'{first.name}': {', '.join(why)}{price}"
    )


def _assumed(args: argparse.Namespace, lengths: LengthDistribution) -> str:
    if args.calibrate is not None:
        return f"costs as {args.calibrate} shows them; responses {lengths.mean:.0f} tokens in the mean"
    source = machines()[args.gpu].source
    tail = "" if args.trace else " (assumed: a long tail; --trace gives your own)"
    return f"{args.gpu} ({source}); responses {lengths.mean:.0f} tokens in the mean{tail}"


def _print(tried: Sequence[tuple[Setting, Forecast]], against: Sequence[str], assumed: str) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for setting, forecast in tried:
        table.add_row(setting.name, *(of(forecast) for _, of in _COLUMNS))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)
    print()
    for setting, forecast in tried:
        if forecast.pools:
            told = (
                f"{name} {pool.tokens:.0%} of the tokens, {pool.cost:.3g} a million trained ones"
                for name, pool in forecast.pools.items()
            )
            print(f"pools: {setting.name}: {'; '.join(told)}")
    print(reason(tried))
    print(f"from: {assumed}")
    for line in _folded(against):
        print(f"not possible: {line}")


def _folded(against: Sequence[str]) -> list[str]:
    """One line for a reason, however many settings it stands against."""
    names: dict[str, list[str]] = defaultdict(list)
    for line in against:
        name, _, why = line.partition(": ")
        names[why].append(name)
    return [
        f"{found[0]}{f' and {len(found) - 1} more' * (len(found) > 1)}: {why}" for why, found in names.items()
    ]
