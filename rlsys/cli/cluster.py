"""Commands for a cluster and for a running run: submit, status, logs, doctor."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.diagnosis import request_diagnosis
from launch.plan import Node, Ports, build_plan
from launch.rundir import CONFIG_FILE
from launch.status import role_logs, show_logs, status_lines
from launch.submit import SCRIPT, JobOptions, job_script, submit
from rlsys.config import Config, load_config
from rlsys.convert.hub import pin_models
from rlsys.core.errors import UserError
from rlsys.obs.coordinator import CoordinatorUnreachable
from rlsys.obs.doctor import Finding, examine
from rlsys.planner.layout import lay_out
from rlsys.planner.model_preflight import check_model

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""Creates a sub-command from its name, its function and its help text."""
Check = Callable[[Config], None]
"""Checks a config; raises UserError."""
LiveStatus = Callable[[Path], dict[str, Any] | None]
"""Returns the status of a run's coordinator, or None if the run has none. Raises CoordinatorUnreachable if the
coordinator does not respond."""
CheckBuild = Callable[[], None]
"""Checks that this environment can build a trainer; raises UserError."""


def add_commands(add: Add, check_plugins: Check, live_status: LiveStatus, check_build: CheckBuild) -> None:
    """Add `rlsys submit`, `status`, `doctor` and `logs`."""
    sub = add(
        "submit",
        partial(submit_run, check_plugins),
        "submit a run to Slurm as a job that resumes after a preemption",
    )
    sub.add_argument("config", type=Path, metavar="CONFIG", help="YAML file, or the name of a shipped config")
    sub.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="config values that override the file's",
    )
    sub.add_argument("--nodes", type=int, metavar="N", help="number of nodes; same as launch.nodes=N")
    sub.add_argument(
        "--time", metavar="T", help="time limit, such as 8:00:00; the job requeues itself before it expires"
    )
    sub.add_argument("--partition", metavar="P", help="Slurm partition")
    sub.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="further option of sbatch; may be repeated",
    )
    sub.add_argument("--dry-run", action="store_true", help="print the script, without submitting it")
    sub = add("status", partial(show_status, live_status), "show the state of a run")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder")
    sub = add(
        "doctor",
        partial(run_doctor, check_build),
        "show what this machine has and lacks, or what the processes of a run wait for",
    )
    sub.add_argument("run", type=Path, metavar="RUN", nargs="?", help="run folder")
    sub = add("logs", print_logs, "show the logs of a run")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder")
    sub.add_argument("--role", help="role such as engine-0, rollout, trainer or supervisor (default: all)")
    sub.add_argument(
        "--lines",
        type=int,
        default=20,
        metavar="N",
        help="number of lines from the end of each log (default: 20)",
    )
    sub.add_argument("--follow", action="store_true", help="print new lines as they are written")


def submit_run(check_plugins: Check, args: argparse.Namespace) -> int:
    """Run `rlsys submit`."""
    nodes = [f"launch.nodes={args.nodes}"] if args.nodes is not None else []
    config = pin_models(load_config(args.config, [*args.overrides, *nodes, "launch.backend=slurm"]))
    options = JobOptions(args.time, args.partition, tuple(args.sbatch))
    try:
        check_model(config)
    except UserError as e:
        if not args.dry_run:
            raise
        print(f"rlsys: warning: {e}", file=sys.stderr)  # the model may exist only on the job's nodes
    check_reachable(config)
    check_plugins(config)
    script = job_script(config, args.config, args.overrides, options)
    print(script if args.dry_run else submit(config, script), end="" if args.dry_run else "\n")
    return 0


def check_reachable(config: Config) -> None:
    """Check that the layout fits the nodes, and that weights can reach every engine.

    Raises:
        UserError: the layout does not fit, or the weights cannot reach an engine.
    """
    count = config.engine.count
    # The names of Slurm's nodes, the ports and the command lines do not matter for this check.
    nodes = [Node(f"node-{i}", f"node-{i}") for i in range(config.launch.nodes)]
    ports = Ports([0] * count, 0, (0,) * count)
    build_plan(config, lay_out(config), nodes, ports, lambda *_: ([], {}))


def show_status(live_status: LiveStatus, args: argparse.Namespace) -> int:
    """Run `rlsys status`."""
    check_run_folder(args.run)
    try:
        live = live_status(args.run)
    except CoordinatorUnreachable as e:
        live = {"coordinator": str(e)}
    print("\n".join(status_lines(args.run, time.time(), live)))
    return 0


def run_doctor(check_build: CheckBuild, args: argparse.Namespace) -> int:
    """Run `rlsys doctor`: diagnose a run, or examine this machine."""
    if args.run is not None:
        check_run_folder(args.run)
        print(request_diagnosis(args.run), end="")
        return 0
    findings = [*examine(), examine_trainer(check_build)]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(
            finding.name, finding.value if finding.ok else f"[red]{finding.value}[/red]", finding.note
        )
    Console().print(table)
    return 0 if all(finding.ok for finding in findings) else 1


def examine_trainer(check_build: CheckBuild) -> Finding:
    """Return whether this environment can build a trainer."""
    try:
        check_build()
    except UserError as e:
        return Finding("trainer", "cannot be built", str(e), ok=False)
    return Finding("trainer", "its layers can be built", "of the quickstart's model, on the CPU")


def print_logs(args: argparse.Namespace) -> int:
    """Run `rlsys logs`."""
    check_run_folder(args.run)
    for line in show_logs(role_logs(args.run, args.role), args.lines, follow=args.follow):
        print(line)
    return 0


def check_exists(run: Path) -> None:
    """Check that the folder of a run exists.

    Raises:
        UserError: the folder does not exist.
    """
    if not run.is_dir():
        raise UserError(f"{run}: folder not found")


def check_run_folder(run: Path) -> None:
    """Check that a folder is the folder of a run that was started or submitted.

    Raises:
        UserError: the folder does not exist, or is no run folder.
    """
    check_exists(run)
    if not any((run / file).is_file() for file in (CONFIG_FILE, SCRIPT)):
        raise UserError(f"{run}: not a run folder: contains no {CONFIG_FILE}")
