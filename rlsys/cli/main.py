"""The command `rlsys`. A user error ends with one line `rlsys: error: ...` and exit code 2; a failed run with 1."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from launch.backends import Backend
from launch.backends.selection import open_backend
from launch.console import Display
from launch.environment import allocator_notes
from launch.exporter import run_plan
from launch.plan import LaunchPlan, build_client_plan, build_plan, build_sft_plan, build_tenants_plan
from launch.ports import choose_ports
from launch.process import RoleFailed
from launch.readiness import PortInUse
from launch.requeue import check_folder, may_requeue
from launch.rundir import open_run_dir
from launch.stops import NodeLost, StoppedBySignal, StopSignals
from rlsys.cli.cluster import Add, add_commands, check_exists
from rlsys.cli.engines import add_engines
from rlsys.cli.explain import add_explain
from rlsys.cli.import_script import add_import
from rlsys.cli.meet import add_meet
from rlsys.cli.models import add_model_commands, find_subject
from rlsys.cli.plan import add_plan
from rlsys.cli.project import add_project_commands
from rlsys.cli.rehearse import add_rehearse
from rlsys.cli.router import add_router
from rlsys.cli.tenants import add_tenants, key_lines, read_options
from rlsys.cli.view import add_view_commands, feed_trackers
from rlsys.config import Config, add_config, load_config
from rlsys.config.precision import check_device, device_capability
from rlsys.convert.hub import pin_models
from rlsys.core.devices import have_cuda
from rlsys.core.errors import RlsysError, UserError
from rlsys.core.run_files import newest_checkpoint_step
from rlsys.data.pin import pin_data
from rlsys.engine.launch_args import engine_command
from rlsys.importers.explain import explain_options
from rlsys.obs.metrics import FILE_NAME as METRICS_FILE
from rlsys.obs.metrics import read_metrics
from rlsys.obs.otlp import check_spans
from rlsys.obs.progress import evaluation_lines, make_progress
from rlsys.obs.report import summary_table, write_report
from rlsys.obs.summary import summarise
from rlsys.obs.symptoms import sentence
from rlsys.planner.layout import lay_out
from rlsys.planner.model_preflight import check_gpus, check_model
from rlsys.rehearse.trial import check_build
from rlsys.viewer.trackers.tracker import check_trackers


def train(args: argparse.Namespace) -> int:
    """Run `rlsys train`: start or resume a run, and print its report."""
    from rlsys.rollout.preflight import check_names

    config = pin_data(pin_models(load_config(args.config, args.overrides)))
    check_gpus(config)
    check_model(config)
    check_observers(config)
    check_names(config)
    capability = device_capability()
    # Other nodes check their GPUs; the trainer does so if the capability is unknown in this process.
    if config.launch.backend == "local" and (capability is not None or not have_cuda()):
        has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
        check_device(config, capability, has_transformer_engine)
    layout = lay_out(config)

    def plan(backend: Backend) -> LaunchPlan:
        ports = choose_ports(config, layout, backend.free_ports)
        return build_plan(config, layout, backend.nodes, ports, engine_command)

    supervise(config, plan, functools.cache(lambda: check_plugins(config)))
    show_report(config.run.dir)
    return 0


def sft(args: argparse.Namespace) -> int:
    """Run `rlsys sft`: fine-tune on existing answers (docs/sft.md)."""
    config = pin_models(load_config(args.config, args.overrides))
    check_model(config)
    layout = lay_out(config)

    @functools.cache
    def check_first_step() -> None:
        from rlsys.cli.preflight import check_answers  # imports torch

        check_answers(config)
        check_build(config)

    supervise(
        config,
        lambda b: build_sft_plan(config, layout, b.nodes, choose_ports(config, layout, b.free_ports)),
        check_first_step,
    )
    print(f"model: {config.run.dir / 'model'}")
    return 0


def tenants(args: argparse.Namespace) -> int:
    """Run `rlsys tenants`: serve Tinker's protocol to clients that train adapters on one model (docs/tenants.md)."""
    options = read_options(args)
    config = options.config
    check_model(config)
    layout = lay_out(config)

    def plan(backend: Backend) -> LaunchPlan:
        for line in key_lines(config.run.dir, options):
            print(f"rlsys: {line}", flush=True)
        ports = choose_ports(config, layout, backend.free_ports)
        return build_tenants_plan(config, layout, backend.nodes, ports, engine_command, options.arguments)

    supervise(config, plan, functools.cache(lambda: check_build(config)))
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Run `rlsys eval`: evaluate a model on the held-out prompts and eval.sets."""
    subject = find_subject(args.target, args.checkpoint, args.overrides)
    if subject.config.eval.prompts == 0:
        raise UserError("eval.prompts = 0: nothing is measured; expected more than 0")
    with subject.serving_config() as config:
        check_model(config)
        layout = lay_out(config)

        def plan(backend: Backend) -> LaunchPlan:
            ports = choose_ports(config, layout, backend.free_ports)
            return build_client_plan(
                config, layout, backend.nodes, ports, engine_command, "rlsys.evaluation.evaluation",
                ("--step", str(subject.step)),
            )  # fmt: skip

        supervise(config, plan, use_stderr=args.json)
    entry = read_metrics(config.run.dir).evals[-1]
    result = {"model": subject.name, **{k: v for k, v in entry.items() if k not in ("kind", "step", "time")}}
    print(json.dumps(result, indent=2) if args.json else "\n".join(evaluation_lines(result)))
    return 0


def supervise(
    config: Config,
    make_plan: Callable[[Backend], LaunchPlan],
    check: Callable[[], None] = lambda: None,
    *,
    use_stderr: bool = False,
) -> None:
    """Run the processes of a plan with the live display until the run ends.

    If nodes are lost, or other servers use the run's ports, start again with other nodes or ports.

    Args:
        config: config of the run.
        make_plan: builds the plan; called at each start.
        check: the Supervisor's check; called at each start.
        use_stderr: whether to show the display on stderr, because a program reads stdout.

    Raises:
        StoppedBySignal: a signal or the scheduler stopped the run.
        NodeLost, PortInUse: this happened more than launch.max_restarts times without a train step in between, or
            there are no other nodes.
        RlsysError: the error of a failed role.
    """
    console = Console(stderr=use_stderr)
    check_folder(config.run.dir)
    with (
        StopSignals().listening() as stop,
        open_run_dir(config, lambda text: console.print(f"rlsys: {text}", highlight=False)) as run_dir,
        contextlib.closing(open_backend(config, run_dir.lock_fd)) as backend,
        make_progress(config.trainer.steps, f"rlsys {config.run.dir}", console) as display,
        feed_trackers(config, lambda text: console.print(f"rlsys: {text}", highlight=False)),
    ):
        failures = ConsecutiveFailures(run_dir.path)
        while True:
            try:
                run_plan(config, make_plan(backend), backend, run_dir, display, stop, check)
                return
            except NodeLost as error:
                if failures.add() > config.launch.max_restarts:
                    raise
                display.phase(f"{error.event}; replacing them")
                if not backend.replace_nodes(lambda: stop.count > 0):
                    request_requeue(config, run_dir.path, backend, display)
                    raise
            except PortInUse as conflict:
                if config.engine.port:
                    raise UserError(
                        f"engine.port = {config.engine.port}: {conflict}; 0 chooses free ports"
                    ) from None
                if failures.add() > config.launch.max_restarts:
                    raise
                display.phase(f"{conflict}; retrying with other ports")
            except StoppedBySignal as stop_error:
                if stop_error.number == signal.SIGUSR1 or backend.preempted():
                    request_requeue(config, run_dir.path, backend, display)
                raise StoppedBySignal(stop_error.number, resume_point(run_dir.path)) from None


class ConsecutiveFailures:
    """Number of failures of a run without a train step in between."""

    def __init__(self, run: Path) -> None:
        """Start with no failure. `run`: the run folder."""
        self._run = run
        self._count, self._last_step = 0, -1

    def add(self) -> int:
        """Count a failure, and return the number of failures since the last train step."""
        step = last_train_step(self._run)
        self._count = 1 if step > self._last_step else self._count + 1
        self._last_step = max(step, self._last_step)
        return self._count


def last_train_step(run: Path) -> int:
    """Return the last train step in a run's metrics; 0 if there is none."""
    return read_metrics(run).last_step if (run / METRICS_FILE).is_file() else 0


def resume_point(run: Path) -> str:
    """Describe after which train step a stopped run ended, and from which checkpoint it continues.

    The text is empty if the run has no train step, as in an evaluation.
    """
    last_step = last_train_step(run)
    if not last_step:
        return ""
    checkpoint = newest_checkpoint_step(run)
    if checkpoint >= last_step:
        return f"after train step {last_step}, which is saved"
    newest = f"the newest checkpoint is of step {checkpoint}" if checkpoint else "no checkpoint exists"
    repeated = f"steps {checkpoint + 1} to {last_step}" if last_step > checkpoint + 1 else f"step {last_step}"
    return f"after train step {last_step}; {newest}, so train {repeated} will be repeated"


def request_requeue(config: Config, run: Path, backend: Backend, display: Display) -> None:
    """Make the scheduler start the same command again, unless too many consecutive sessions made no progress."""
    limit = config.launch.max_restarts
    if may_requeue(run, progress(run), limit):
        backend.requeue()
    else:
        display.phase(f"no requeue: {limit} consecutive sessions made no progress (launch.max_restarts)")


def progress(run: Path) -> int:
    """Return the number of tokens in a stopped run's ledger; without a ledger, the number of train steps."""
    from rlsys.ledger.reader import RunReader

    try:
        return sum(RunReader(run).ledger().tokens.values())
    except UserError:  # the run fine-tunes, or has not generated a token
        return last_train_step(run)


def show_report(run_dir: Path) -> None:
    """Write and print the report of a run."""
    console = Console()
    write_report(run_dir)
    metrics = read_metrics(run_dir)
    console.print(summary_table(run_dir, summarise(metrics)))
    for warning in metrics.warnings:
        text = f"warning, step {warning['step']}: {sentence(warning)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {run_dir / 'report.html'}", highlight=False, soft_wrap=True)


def check_plugins(config: Config) -> None:
    """Check that a run can start, and print notes about it.

    Raises:
        UserError: the run cannot start.
    """
    from rlsys.cli.preflight import check_start  # imports torch

    check_observers(config)
    for line in [*check_start(config), *allocator_notes(config)]:
        print(f"rlsys: note: {line}", file=sys.stderr)


def check_quickstart_trainer() -> None:
    """Check that the installed packages can build the quickstart's trainer.

    Raises:
        UserError: the packages cannot.
    """
    check_build(load_config(Path("quickstart"), []))


def check_observers(config: Config) -> None:
    """Check that the config's trackers and the receiver of spans can be used.

    Raises:
        UserError: one cannot be used.
    """
    check_trackers(config.run.trackers)
    check_spans(config.run.spans)


def report(args: argparse.Namespace) -> int:
    """Run `rlsys report`: write and print the report of a run."""
    check_exists(args.run)
    if args.json:
        print(json.dumps(summarise(read_metrics(args.run)), indent=2))
    else:
        show_report(args.run)
    return 0


def ledger(args: argparse.Namespace) -> int:
    """Run `rlsys ledger`: print the counts of a run's ledger, and check them.

    Raises:
        RunError: the counts are inconsistent (exit code 1).
    """
    from rlsys.ledger.ledger import check_ledger
    from rlsys.ledger.reader import RunReader

    check_exists(args.run)
    counts = RunReader(args.run).ledger()
    if args.json:
        print(json.dumps(counts.figures(), indent=2))
    else:
        Console().print(ledger_table(counts.figures()))
    check_ledger(counts)
    return 0


def live_status(run: Path) -> dict[str, Any] | None:
    """Return the status of a run's coordinator; None if the run has none."""
    from rlsys.ledger.reader import RunReader

    return RunReader(run).status()


def ledger_table(figures: dict[str, int | dict[str, int]]) -> Table:
    """Return a table of counts: one row per state, with columns for groups, samples and tokens.

    Args:
        figures: `samples` and `tokens`: state -> count; any other name: the number of groups in that state, or of the
            row's unit.
    """
    samples, tokens = figures["samples"], figures["tokens"]
    assert isinstance(samples, dict) and isinstance(tokens, dict)
    units = {"parked": "samples", "in_flight": "samples", "lost": "tokens"}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "groups", "samples", "tokens"):
        table.add_column(name, justify="right" if name else "left")
    for name, value in figures.items():
        if isinstance(value, int):
            counts = {units.get(name, "groups"): value}
            counts |= {"samples": samples[name], "tokens": tokens[name]} if name in samples else {}
            cells = (f"{counts[u]:,}" if u in counts else "" for u in ("groups", "samples", "tokens"))
            table.add_row(name.replace("_", " "), *cells)
    return table


def algo(args: argparse.Namespace) -> int:
    """Run `rlsys algo list` or `rlsys algo show`."""
    from rlsys.algo.catalogue import render_list, render_show

    print(render_show(args.name) if args.name is not None else render_list())
    return 0


def check_algo(args: argparse.Namespace) -> int:
    """Run `rlsys algo check`: check that a plug-in satisfies the contract of its kind."""
    from rlsys.algo.contract import check_kind, check_promises, kind_of

    config = pin_models(load_config(args.config, args.overrides), weights=False)
    kind = kind_of(args.name) if args.kind is None else check_kind(args.kind)
    for line in check_promises(config, kind, args.name):
        print(f"ok  {line}")
    return 0


class Parser(argparse.ArgumentParser):
    """ArgumentParser with one-line errors that accepts overrides before and after options."""

    _parsing_intermixed = False

    def __init__(self, **settings: Any) -> None:
        # With abbreviations, --token would match --token-file, and the error would print a secret as a missing file.
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accept overrides before and after options. By default, argparse refuses those after an option."""
        if self._parsing_intermixed or not any(action.dest == "overrides" for action in self._actions):
            return super().parse_known_args(args, namespace)
        self._parsing_intermixed = True  # parse_known_intermixed_args calls this method again
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._parsing_intermixed = False

    def error(self, message: str) -> NoReturn:
        """Print the error as one line, and exit with UserError's code."""
        head, unknown, options = message.partition("unrecognized arguments: ")
        if unknown and not head and (explanation := explain_options(options.split())) is not None:
            message = explanation
        print(f"rlsys: error: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(UserError.exit_code)


GROUPS = {
    "Prepare a run": ("new", "import", "explain", "try", "plan", "rehearse"),
    "Run": ("train", "sft", "submit", "engines"),
    "Observe a run": ("status", "logs", "report", "samples", "dash", "ledger", "track", "doctor"),
    "Models": ("eval", "convert"),
    "Serve": ("router", "tenants", "meet"),
    "Algorithms": ("algo",),
}
"""Title of a group of commands -> their names, in the order of `rlsys --help`."""


def command_list(helps: Mapping[str, str]) -> str:
    """Return the list of commands for `rlsys --help`.

    Args:
        helps: name of each command -> its help text.

    Raises:
        KeyError: a command is in no group.
    """
    lines: list[str] = []
    remaining = dict(helps)
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            text = textwrap.wrap(remaining.pop(name), 68)
            lines += [f"  {name:10}{text[0]}", *(" " * 12 + line for line in text[1:])]
    if remaining:
        raise KeyError(f"commands without a group: {', '.join(remaining)}")
    return "\n".join(lines[1:])


def make_parser() -> Parser:
    """Create the parser with all commands."""
    parser = Parser(
        prog="rlsys",
        usage="rlsys [-h] [--version] COMMAND ...",
        description="RL post-training of MoE language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlsys {metadata.version('rlsys')}")
    commands = parser.add_subparsers(prog="rlsys", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    helps: dict[str, str] = {}

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        helps[name] = help
        sub = commands.add_parser(name, description=help)
        sub.set_defaults(run_command=run)
        return sub

    add_run_commands(add)
    add_evaluation(add)
    add_algorithms(add)
    add_explain(add)
    add_commands(add, check_plugins, live_status, check_quickstart_trainer)
    add_engines(add)
    add_view_commands(add)
    add_import(add)
    add_project_commands(add, supervise, check_plugins)
    add_rehearse(add)
    add_plan(add)
    add_router(add)
    add_tenants(add, tenants)
    add_meet(add)
    add_model_commands(add)
    parser.epilog = command_list(helps)
    return parser


def add_run_commands(add: Add) -> None:
    """Add `rlsys train`, `sft`, `report` and `ledger`."""
    for name, run, help in (
        ("train", train, "start or resume a run"),
        ("sft", sft, "fine-tune on chats, preference pairs or traces"),
    ):
        sub = add(name, run, help)
        add_config(sub)
    for name, run, help in (
        ("report", report, "write report.html and plots of a run, and print its metrics"),
        ("ledger", ledger, "count a run's groups, samples and tokens by state, and check their consistency"),
    ):
        sub = add(name, run, help)
        sub.add_argument("run", type=Path, metavar="RUN", help="run folder")
        sub.add_argument("--json", action="store_true", help="print JSON only")


def add_evaluation(add: Add) -> None:
    """Add `rlsys eval`."""
    sub = add("eval", evaluate, "evaluate a model on the held-out prompts and the named sets")
    sub.add_argument("target", type=Path, metavar="CONFIG|RUN", help="YAML file, or run folder")
    sub.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="config values that override the target's",
    )
    sub.add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="model folder, a hub's owner/name[@REVISION], or checkpoint (default: the config's model, or the run's "
        "newest checkpoint)",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print JSON only")


def add_algorithms(add: Add) -> None:
    """Add `rlsys algo`."""
    sub = add("algo", algo, "list the algorithms that a config can name, or show one")
    algo_commands = sub.add_subparsers(required=True, metavar="list|show|check")
    algo_commands.add_parser("list", help="list all algorithms by kind").set_defaults(name=None)
    algo_commands.add_parser("show", help="show one algorithm with its parameters").add_argument(
        "name", metavar="NAME"
    )
    check_parser = algo_commands.add_parser(
        "check", help="check that a plug-in satisfies the contract of its kind"
    )
    check_parser.set_defaults(run_command=check_algo)
    check_parser.add_argument(
        "name", metavar="NAME", help="short name, package.module:name or path/to/file.py:name"
    )
    check_parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="config values of the run that uses the plug-in",
    )
    check_parser.add_argument("--kind", help="kind of a plain function: loss, advantage, correction, ...")
    check_parser.add_argument(
        "--config",
        type=Path,
        default=Path("quickstart"),
        help="config of the run that uses the plug-in (default: quickstart)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  (until the process ends)
    args = make_parser().parse_args(argv)
    try:
        code = int(args.run_command(args))
        sys.stdout.flush()
        return code
    except RlsysError as e:
        for line in e.log_lines if isinstance(e, RoleFailed) else ():
            print(f"    {line}", file=sys.stderr)
        print(f"rlsys: error: {' '.join(str(e).split())}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("rlsys: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `rlsys ... | head`: the reader has closed the pipe
        # Without this, the flush at exit would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as e:
        if e.filename is None or e.strerror is None:
            raise
        print(f"rlsys: error: {e.filename}: {e.strerror}", file=sys.stderr)
        return UserError.exit_code if isinstance(e, PermissionError | FileNotFoundError) else 1


if __name__ == "__main__":
    sys.exit(main())
