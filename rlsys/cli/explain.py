"""`rlsys explain`: summary of a config on one screen. It starts nothing, and needs no weights."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace

import psutil
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from launch.describe import (
    describe_arithmetic,
    describe_fine_tuning,
    describe_idle,
    describe_parts,
    describe_plan,
    describe_prompts,
)
from launch.diagram import NodeGroup, draw, group_nodes
from launch.environment import allocator_notes
from launch.plan import LaunchPlan, Node, Ports, build_plan, build_sft_plan
from rlsys.cli.cluster import Add
from rlsys.config import Config, add_config, dump_config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.hub import pin_models
from rlsys.core.errors import UserError
from rlsys.core.machines import machines
from rlsys.core.model_folder import check_files
from rlsys.engine.launch_args import attention_notes, engine_command, have_cuda
from rlsys.obs.metrics import FILE_NAME as METRICS_FILE
from rlsys.obs.metrics import read_metrics
from rlsys.obs.otlp import check_spans
from rlsys.planner.capacity import describe_capacity, forecast_step
from rlsys.planner.duration import NO_ESTIMATE, describe_forecast, measured_duration
from rlsys.planner.layout import lay_out
from rlsys.planner.memory import (
    GB,
    TRAINER_FACTS,
    Fact,
    describe_memory,
    memory_problems,
    size_warnings,
    trainer_memory_problems,
)
from rlsys.planner.model_preflight import check_tensors, read_model
from rlsys.planner.traffic import describe_traffic
from rlsys.planner.unusual_settings import host_memory_problems, slow_bfloat16, unusual_settings
from rlsys.viewer.trackers.tracker import check_trackers

_LABEL_WIDTH = 20


@dataclass(frozen=True)
class Screen:
    """Content of the screen.

    Attributes:
        title: first line.
        parts: headings and their facts.
        node_groups: roles on nodes and GPUs.
        gpus_per_node: number of GPUs of each node.
        warnings: lines about settings that may be mistakes.
    """

    title: str
    parts: list[tuple[str, list[Fact]]]
    node_groups: list[NodeGroup]
    gpus_per_node: int
    warnings: list[str]


def add_explain(add: Add) -> None:
    """Add `rlsys explain`."""
    sub = add("explain", explain, "summarise a config: processes, sizes, duration, and suspicious settings")
    add_config(sub)
    sub.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of one GPU (default: launch.gpu_memory_gb)",
    )
    sub.add_argument("--config", action="store_true", dest="whole", help="print the resolved config instead")
    sub.add_argument("--commands", action="store_true", help="print the command of every process instead")


def explain(args: argparse.Namespace) -> int:
    """Run `rlsys explain`."""
    from rlsys.cli.preflight import check_fine_tuning, check_start  # imports torch

    config = with_gpu_memory(load_config(args.config, args.overrides), args.gpu_memory)
    missing_model = None
    try:
        config = pin_models(config, weights=False)
    except UserError as e:
        check_files(config.model.path)
        missing_model = str(e)
    screen, plan = describe_run(config, config.launch.gpu_memory_gb, missing_model)
    check_trackers(config.run.trackers)
    check_spans(config.run.spans)
    notes = check_fine_tuning(config) if config.fine_tunes else check_start(config)
    if args.whole or args.commands:
        sections = [dump_config(config)] * args.whole + [describe_commands(config, plan)] * args.commands
        print("\n".join(sections))
        for note in notes:
            print(f"rlsys: note: {note}", file=sys.stderr)
        return 0
    screen.warnings.extend(notes)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(render_rich(screen))
    else:
        print(render_plain(screen))
    return 0


def with_gpu_memory(config: Config, gpu_gb: float | None) -> Config:
    """Return the config with launch.gpu_memory_gb = `gpu_gb`; for None, the config itself.

    Raises:
        UserError: `gpu_gb` is not a finite number above 0.
    """
    if gpu_gb is None:
        return config
    if not 0 < gpu_gb < math.inf:
        raise UserError(f"--gpu-memory {gpu_gb}: expected a finite number of GB above 0")
    return config.model_copy(update={"launch": config.launch.model_copy(update={"gpu_memory_gb": gpu_gb})})


def describe_run(
    config: Config, gpu_gb: float, missing_model: str | None = None
) -> tuple[Screen, LaunchPlan]:
    """Return the content of the screen without the notes of the preflight, and the plan.

    Args:
        config: config of the run.
        gpu_gb: memory of one GPU in GB.
        missing_model: why the model is not available; None if it is.

    Raises:
        UserError: the config cannot run.
    """
    if config.fine_tunes:
        return describe_fine_tuning_run(config, gpu_gb, missing_model)
    from rlsys.algo.no_effect import describe_passes  # imports torch

    passes = [("" if i else "log-prob passes", line) for i, line in enumerate(describe_passes(config))]
    sizes = describe_arithmetic(config)
    if config.model.path.exists():
        model_sizes, warnings, duration = _describe_model(config, gpu_gb)
        sizes += model_sizes
    else:
        warnings = [_missing_model_warning(config, missing_model)]
        duration = "not known without the model's config.json"
    plan, layout = placeholder_plan(config), lay_out(config)  # the model has been checked against the layout
    warnings += describe_idle(config, plan) + allocator_notes(config) + attention_notes(config)
    if config.launch.release_memory and not (config.launch.gpus_per_node or have_cuda()):
        warnings.append("launch.release_memory = true: it frees nothing on a host without GPUs")
    other_roles = [r for r in plan.roles if r.kind != "trainer" and not r.unit.startswith("engine-")]
    return Screen(
        title=f"run {config.run.dir}",
        parts=[
            ("what", [*describe_parts(config), *passes]),
            ("size", sizes),
            ("time", [("duration", _remaining_duration(config) or duration)]),
        ],
        node_groups=group_nodes(layout, other_roles, config.launch.nodes),
        gpus_per_node=config.launch.gpus_per_node,
        warnings=warnings,
    ), plan


def _describe_model(config: Config, gpu_gb: float) -> tuple[list[Fact], list[str], str]:
    """Return sizes, warnings and the forecast duration of a run of a model whose folder exists.

    Args:
        config: config of the run.
        gpu_gb: memory of one GPU in GB.

    Raises:
        UserError: the model does not fit the config.
    """
    from megatron_patches import have_transformer_engine  # imports torch

    hf = read_model(config)
    check_tensors(config, hf)
    engine = have_transformer_engine() if have_cuda() else config.launch.gpus_per_node > 0
    traffic, traffic_warnings = describe_traffic(config, hf)
    sizes = [describe_prompts(config, hf, engine), *describe_memory(config, hf), *traffic]
    warnings = [
        *size_warnings(config, hf),
        *_machine_problems(config, hf, gpu_gb),
        *unusual_settings(config, hf),
        *traffic_warnings,
    ]
    if not config.launch.gpus_per_node:
        return sizes, warnings, NO_ESTIMATE
    forecast = forecast_step(config, hf, machines()["h100"])
    return [*sizes, *describe_capacity(config, forecast)], warnings, describe_forecast(config, forecast)


def _missing_model_warning(config: Config, missing_model: str | None) -> str:
    """Return the warning about a missing model. `missing_model`: the reason, if it is known."""
    reason = missing_model or f"{config.model.path} does not exist"
    return f"NOT CHECKED: {reason}: whether it fits the layout, parameters, memory"


def _machine_problems(config: Config, hf: HFConfig, gpu_gb: float) -> list[str]:
    """Return a line for each problem of the GPUs' memory; for a run without GPUs, each problem of this machine."""
    if not (config.launch.gpus_per_node or have_cuda()):
        return host_memory_problems(config, hf, psutil.virtual_memory().total / GB) + slow_bfloat16(config)
    if config.fine_tunes:
        return trainer_memory_problems(config, hf, gpu_gb)
    return memory_problems(config, hf, gpu_gb)


def describe_fine_tuning_run(
    config: Config, gpu_gb: float, missing_model: str | None
) -> tuple[Screen, LaunchPlan]:
    """Return the content of the screen for `rlsys sft`, whose run has no engines and prompts, and the plan.

    The arguments are those of `describe_run`.
    """
    sizes, warnings = [], []
    if config.model.path.exists():
        hf = read_model(config)
        check_tensors(config, hf)
        sizes = [fact for fact in describe_memory(config, hf) if fact[0] in TRAINER_FACTS]
        warnings = _machine_problems(config, hf, gpu_gb) + unusual_settings(config, hf)
    else:
        warnings = [_missing_model_warning(config, missing_model)]
    layout = replace(lay_out(config), engines=[])
    plan = build_sft_plan(config, layout, _placeholder_nodes(config), Ports([], 0, ()))
    duration = _remaining_duration(config) or "not estimated: it depends on the length of the answers"
    return Screen(
        title=f"run {config.run.dir}: rlsys sft",
        parts=[
            ("what", describe_fine_tuning(config)),
            ("size", sizes),
            ("time", [("duration", duration)]),
        ],
        node_groups=group_nodes(layout, [], config.launch.nodes),
        gpus_per_node=config.launch.gpus_per_node,
        warnings=warnings + allocator_notes(config),
    ), plan


def placeholder_plan(config: Config) -> LaunchPlan:
    """Return the plan, with placeholders for the names and addresses of nodes and for ports."""
    first, engines = config.engine.port, config.engine.count
    ports = Ports([first + i if first else 0 for i in range(engines)], 0, (0,) * engines)
    return build_plan(config, lay_out(config), _placeholder_nodes(config), ports, engine_command)


def _placeholder_nodes(config: Config) -> list[Node]:
    """Return launch.nodes nodes with placeholder names; localhost for a run on one node."""
    if config.launch.nodes == 1:
        return [Node("localhost")]
    return [Node(f"node-{i}", f"node-{i}") for i in range(config.launch.nodes)]


def _remaining_duration(config: Config) -> str | None:
    """Return a text about the remaining duration of a run, measured on its steps; None if it has not started."""
    if not (config.run.dir / METRICS_FILE).is_file():
        return None
    metrics = read_metrics(config.run.dir)
    remaining_steps = max(0, config.trainer.steps - metrics.last_step)
    return measured_duration([s["time_step"] for s in metrics.steps if s.get("time_step")], remaining_steps)


def describe_commands(config: Config, plan: LaunchPlan) -> str:
    """Return the command lines of all processes."""
    lines = [describe_plan(plan)]
    if not config.engine.port:
        lines.append("(port 0: a free port is chosen at the start)")
    return "\n".join(lines)


def render_plain(screen: Screen) -> str:
    """Return the screen as text for a pipe or a file: one fact per line, without wrapping."""
    lines = [screen.title]
    for title, facts in screen.parts:
        lines += ["", title, *(f"  {label:<{_LABEL_WIDTH}} {text}" for label, text in facts)]
    lines += [
        "",
        "where",
        *(f"  {line.plain.rstrip()}" for line in draw(screen.node_groups, screen.gpus_per_node)),
    ]
    lines += ["", "odd", *(f"  {line}" for line in screen.warnings or ["nothing"])]
    return "\n".join(lines)


def render_rich(screen: Screen) -> Group:
    """Return the screen for a terminal, with wrapping and colours."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for title, facts in screen.parts:
        for i, (label, text) in enumerate(facts):
            table.add_row(Text("" if i else title, style="bold cyan"), label, Text(text))
    placement = Group(*draw(screen.node_groups, screen.gpus_per_node))
    table.add_row(Text("where", style="bold cyan"), "nodes and GPUs", placement)
    for i, line in enumerate(screen.warnings or ["nothing"]):
        style = "yellow" if screen.warnings else "green"
        table.add_row(Text("" if i else "odd", style="bold yellow"), "", Text(line, style=style))
    return Group(Text(screen.title, style="bold"), table)
