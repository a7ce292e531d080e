"""`rlsys engines`: lists the engines of a running run, adds one, or drains one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.engine_join import engines, join
from launch.stops import StopSignals
from rlsys.cli.cluster import Add, check_run_folder
from rlsys.config import load_run_config
from rlsys.core import membership
from rlsys.core.errors import UserError
from rlsys.core.owner import current_owner
from rlsys.engine.launch_args import engine_command


def add_engines(add: Add) -> None:
    """Add `rlsys engines`."""
    sub = add("engines", _list, "list the engines of a run, add one, or drain one")
    commands = sub.add_subparsers(required=True, metavar="list|join|drain")
    list_parser = commands.add_parser("list", help="list all engines, with their cost")
    join_parser = commands.add_parser("join", help="start an engine on this machine for a running run")
    join_parser.add_argument(
        "--host", default="127.0.0.1", help="address of this machine for the run (default: loopback)"
    )
    join_parser.add_argument("--pool", metavar="NAME", help="engine pool (one of engine.pools) to join")
    drain_parser = commands.add_parser(
        "drain", help="move an engine's samples to other engines, and remove it"
    )
    drain_parser.add_argument("--undo", action="store_true", help="cancel the drain")
    for subparser, run in ((list_parser, _list), (join_parser, _join), (drain_parser, _drain)):
        subparser.set_defaults(run_command=run)
        subparser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    drain_parser.add_argument("url", metavar="URL", help="URL of the engine, as shown by rlsys engines list")


def _list(args: argparse.Namespace) -> int:
    """Run `rlsys engines list`."""
    check_run_folder(args.run)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("engine", "state", "requests", "rank-hours"):
        table.add_column(name)
    for url, metrics in engines(args.run).items():
        hours = float(str(metrics["rank_seconds"])) / 3600
        table.add_row(url, str(metrics["state"]), str(metrics["requests"]), f"{hours:.2f}")
    Console().print(table)
    return 0


def _join(args: argparse.Namespace) -> int:
    """Run `rlsys engines join`."""
    check_run_folder(args.run)
    max_engines = load_run_config(args.run).launch.max_engines
    count = len(engines(args.run))
    if max_engines is not None and count >= max_engines:
        raise UserError(
            f"launch.max_engines = {max_engines}: {args.run} has {count} engines, so no other engine can join"
        )
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
    """Run `rlsys engines drain`."""
    check_run_folder(args.run)
    owner = current_owner(args.run)
    current_engines = engines(args.run)
    url = args.url.rstrip("/")
    registered = {m.url: m for m in membership.read_members(owner)} if owner is not None else {}
    if owner is None or (url not in current_engines and url not in registered):
        raise UserError(
            f"{url}: not an engine of {args.run}; its engines: {', '.join(current_engines) or 'none'}"
        )
    config = load_run_config(args.run)
    if not args.undo:
        remaining = sum(bool(metrics["serving"]) for u, metrics in current_engines.items() if u != url)
        min_engines = config.launch.min_engines or 1
        if remaining < min_engines:
            raise UserError(
                f"{url}: without this engine, {remaining} engines would serve; expected at least {min_engines} "
                "(launch.min_engines)"
            )
    member = registered.get(url)
    tp, pool = (config.engine.tp, None) if member is None else (member.tp, member.pool)
    membership.write_member(owner, url, tp, pool, active=args.undo)
    print(f"{url} {'rejoins' if args.undo else 'drains; its samples continue on other engines'}")
    return 0
