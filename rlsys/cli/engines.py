"""`rlsys engines`: the engines of a run that goes on; one more joins, or one leaves."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.engine_join import engines, join
from launch.rundir import CONFIG_FILE
from launch.stops import StopSignals
from rlsys.cli.cluster import Add, must_hold_run
from rlsys.config import load_config
from rlsys.core import membership
from rlsys.core.errors import UserError
from rlsys.core.owner import current_owner
from rlsys.engine.launch_args import engine_command


def add_engines(add: Add) -> None:
    sub = add("engines", _list, "show the engines of a run, start one more for it, or send one away")
    which = sub.add_subparsers(required=True, metavar="list|join|drain")
    shown = which.add_parser("list", help="all of them, with what they cost")
    joins = which.add_parser("join", help="start an engine on this machine for a run that goes on")
    joins.add_argument("--host", default="127.0.0.1", help="this machine's address for the run; loopback")
    joins.add_argument("--pool", metavar="NAME", help="of engine.pools, the one that it is to be in")
    leaves = which.add_parser("drain", help="its samples go on in other engines, and it leaves")
    leaves.add_argument("--undo", action="store_true", help="take it back")
    for one, run in ((shown, _list), (joins, _join), (leaves, _drain)):
        one.set_defaults(run_command=run)
        one.add_argument("run", type=Path, metavar="RUN", help="run folder")
    leaves.add_argument("url", metavar="URL", help="as rlsys engines list shows it")


def _list(args: argparse.Namespace) -> int:
    must_hold_run(args.run)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("engine", "state", "requests", "rank-hours"):
        table.add_column(name)
    for url, told in engines(args.run).items():
        hours = float(str(told["rank_seconds"])) / 3600
        table.add_row(url, str(told["state"]), str(told["requests"]), f"{hours:.2f}")
    Console().print(table)
    return 0


def _join(args: argparse.Namespace) -> int:
    must_hold_run(args.run)
    config, here = load_config(args.run / CONFIG_FILE), engines(args.run)
    if (most := config.launch.max_engines) is not None and len(here) >= most:
        raise UserError(f"{args.run}: the run has {len(here)} engines, and launch.max_engines = {most}")
    with StopSignals().listening() as stop:
        join(
            args.run.resolve(),
            args.host,
            args.pool,
            engine_command,
            stop,
            lambda text: print(f"rlsys: {text}", flush=True),
        )
    return 0


def _drain(args: argparse.Namespace) -> int:
    must_hold_run(args.run)
    owner, here, url = current_owner(args.run), engines(args.run), args.url.rstrip("/")
    known = {m.url: m for m in membership.read_members(owner)} if owner is not None else {}
    if owner is None or (url not in here and url not in known):
        raise UserError(f"{url} is no engine of {args.run}; its engines: {', '.join(here) or 'none'}")
    config = load_config(args.run / CONFIG_FILE)
    if not args.undo:
        left, fewest = (
            sum(bool(told["serving"]) for u, told in here.items() if u != url),
            config.launch.min_engines,
        )
        if left < (fewest or 1):
            raise UserError(
                f"{url}: without it {left} engines would serve; expected at least {fewest or 1} (launch.min_engines)"
            )
    joined = known.get(url)
    tp, pool = (config.engine.tp, None) if joined is None else (joined.tp, joined.pool)
    membership.write_member(owner, url, tp, pool, active=args.undo)
    print(f"{url} {'comes back' if args.undo else 'leaves; its samples go on in other engines'}")
    return 0
