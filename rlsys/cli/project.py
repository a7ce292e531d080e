"""Commands for a new project: `rlsys new` writes a folder that trains, `rlsys try` shows what a run would see."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from launch.backends import Backend
from launch.plan import LaunchPlan, build_client_plan
from launch.ports import choose_ports
from rlsys.cli.project_template import data_section, write_config, write_data_config, write_starter
from rlsys.config import Config, add_config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.hub import find_folder, pin_models
from rlsys.core.devices import gpu_names
from rlsys.core.errors import RunError, UserError, disk_errors
from rlsys.data.row_source import heldout_count
from rlsys.engine.launch_args import engine_command
from rlsys.evaluation.tryout import FILE_NAME
from rlsys.planner.layout import lay_out
from rlsys.planner.model_preflight import check_model
from rlsys.planner.recommendation import Recommendation, Value, recommend
from rlsys.planner.unusual_settings import GB, host_memory_problems

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


class Supervise(Protocol):
    """Type of rlsys.cli.main.supervise."""

    def __call__(
        self, config: Config, make_plan: Callable[[Backend], LaunchPlan], *, use_stderr: bool = False
    ) -> None: ...


MAX_CHARACTERS = 800
"""Maximum characters of a text to print."""


def add_project_commands(add: Add, supervise: Supervise, check_plugins: Callable[[Config], None]) -> None:
    """Add the commands."""
    sub = add("new", new, "create a small project that can be trained at once: config, data, reward, test")
    sub.add_argument("folder", type=Path, metavar="NAME", help="folder to create")
    sub.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER_OR_ID",
        help="write a config for this Hugging Face folder, or model of a hub, instead",
    )
    sub.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="with --model: number of GPUs; 0 for a CPU host (default: this host's)",
    )
    sub.add_argument(
        "--gpu", default="h100", metavar="KIND", help="with --model: kind of GPU (default: %(default)s)"
    )
    sub.add_argument(
        "--data", type=Path, metavar="FILE", help="training prompts, as JSON lines or Parquet, verl's too"
    )
    sub.add_argument(
        "--heldout",
        type=Path,
        metavar="FILE",
        help="prompts of evaluations (default: one in eight of --data)",
    )
    sub.add_argument(
        "--reward",
        metavar="FILE[:FUNCTION]",
        help="reward function, or the name of a built-in reward (default: math)",
    )
    sub = add(
        "try",
        lambda args: try_out(args, supervise, check_plugins),
        "generate and score responses to a run's first prompts, and show them",
    )
    add_config(sub)
    sub.add_argument("--json", action="store_true", help="print JSON only")


def new(args: argparse.Namespace) -> int:
    """Write the starter folder; with --data a config for own data, with --model one for that model."""
    if args.model is not None:
        return new_for_model(args)
    if args.gpus is not None:
        raise UserError("--gpus: it requires --model FOLDER")
    config = args.folder / "config.yaml"
    if args.data is not None:
        write_data_config(args.folder, data_section(args.data, args.reward, args.heldout))
        print(f"  {config}\nnext: rlsys try {config}\n      rlsys train {config}")
        return 0
    for option in ("reward", "heldout"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option}: it requires --data FILE")
    for path in write_starter(args.folder):
        print(f"  {path}")
    print(f"next: rlsys try {config}\n      rlsys train {config}")
    print(f"      python -m pytest {args.folder}    (pip install pytest)")
    return 0


def new_for_model(args: argparse.Namespace) -> int:
    """Write NAME/config.yaml with a recommended value for each field that depends on the model or the machine."""
    gpus = len(gpu_names()) if args.gpus is None else args.gpus
    if not 0 <= gpus <= 65536:
        raise UserError(f"--gpus {gpus}: expected a number from 0 to 65536")
    data = data_section(args.data, args.reward, args.heldout)
    snapshot = find_folder(args.model, "--model", weights=False)
    recommendation = recommend(snapshot, gpus, args.gpu, data)
    sections = recommendation.sections
    if args.gpus is None and gpus == 0:
        memory = psutil.virtual_memory().total / GB
        if problems := host_memory_problems(recommendation.config, HFConfig.read(snapshot), memory):
            raise UserError(f"--model {args.model}: {problems[0]}; for machines with GPUs give --gpus N")
    sections["model"]["path"] = replace(sections["model"]["path"], value=str(args.model))
    _limit_evaluation(recommendation)
    config = write_config(args.folder, sections, data)
    print(f"  {config}")
    if args.gpus is None:
        print(f"for {f'the {gpus} GPUs' if gpus else 'the CPU'} of this host; --gpus N: for N GPUs")
    print(f"next: rlsys explain {config}\n      rlsys rehearse {config}\n      rlsys train {config}")
    return 0


def _limit_evaluation(recommendation: Recommendation) -> None:
    """Limit eval.prompts to what the data file holds out; print what prevents reading the file."""
    evaluation = recommendation.sections["eval"]
    try:
        count = heldout_count(recommendation.config)
    except UserError as e:  # data.keys, which the user sets in the new config, may be all that is missing
        print(f"warning: {e}; eval.prompts = {evaluation['prompts'].value} is not checked")
        return
    if count is not None and count < evaluation["prompts"].value:
        evaluation["prompts"] = Value(count, "all prompts that the data hold out")


def try_out(args: argparse.Namespace, supervise: Supervise, check_plugins: Callable[[Config], None]) -> int:
    """Run `rlsys try`: start the config's engines, generate and score responses, and stop the engines."""
    config = pin_models(load_config(args.config, args.overrides))
    check_model(config)
    check_plugins(config)
    folder = create_try_folder(config.run.dir)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    layout = lay_out(config)

    def plan(backend: Backend) -> LaunchPlan:
        ports = choose_ports(config, layout, backend.free_ports)
        return build_client_plan(
            config, layout, backend.nodes, ports, engine_command, "rlsys.evaluation.tryout"
        )

    supervise(config, plan, use_stderr=args.json)
    try:
        entries: list[dict[str, Any]] = json.loads((folder / FILE_NAME).read_text())
    except FileNotFoundError:
        raise RunError(f"{folder}: no result was written; see {folder / 'logs'}") from None
    if args.json:
        print(json.dumps(entries, indent=1))
    else:
        show(entries, Console())
    return 0


def create_try_folder(run_dir: Path) -> Path:
    """Create a new folder RUN-try-N beside the run's folder, which belongs to the run only."""
    for number in itertools.count(1):
        folder = run_dir.with_name(f"{run_dir.name}-try-{number}")
        with disk_errors(folder, UserError), contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def show(entries: list[dict[str, Any]], console: Console) -> None:
    """Print prompts as the model gets them, responses and rewards; then what may prevent learning."""
    for entry in entries:
        console.print(Rule(f"prompt, {entry['tokens']} tokens", align="left"))
        console.print(escape(_shorten(entry["prompt"])), highlight=False)
        for sample in entry["samples"]:
            reward = sample["reward"]
            text = f"reward {_number(reward)}" if reward is not None else f"NO REWARD: {sample['reason']}"
            console.print(
                f"[bold]{escape(text)}[/bold], {sample['tokens']} tokens, {sample['status']}", highlight=False
            )
            if "prompt" in sample:
                console.print(escape(f"to {_shorten(sample['prompt'])}"), highlight=False)
            console.print(escape(_shorten(sample["text"])), style="cyan", highlight=False)
    console.print(Rule(align="left"))
    for line in advice(entries):
        console.print(escape(line), highlight=False)


def advice(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line about the rewards, and one for each problem."""
    samples = [s for entry in entries for s in entry["samples"]]
    rewards = [_sum(s["reward"]) for s in samples if s["reward"] is not None]
    if not rewards:
        yield "No sample has a reward: a run would censor all of them and stop."
        return
    has_signal = [
        len({_sum(s["reward"]) for s in e["samples"] if s["reward"] is not None}) > 1 for e in entries
    ]
    yield f"mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} samples"
    if missing := len(samples) - len(rewards):
        yield f"{missing} of {len(samples)} samples have no reward: a run censors these."
    if not any(has_signal):
        yield (
            "All samples of each prompt have the same reward, which gives no learning signal. If that holds for more "
            "prompts, the task is too hard or too easy, or the reward does not parse the responses."
        )
    if any(has_signal) and not any(s["right"] for s in samples):
        yield (
            f"No sample counts as correct in an evaluation, which requires a reward (or first named part) of "
            "at least "
            f"1 (docs/own-task.md); the highest reward here is {max(rewards):.3g}."
        )
    if truncated := sum(s["status"] == "truncated" for s in samples):
        yield f"{truncated} of {len(samples)} samples were truncated at rollout.max_response_tokens."


def _sum(reward: float | dict[str, float]) -> float:
    return sum(reward.values()) if isinstance(reward, dict) else reward


def _number(reward: float | dict[str, float]) -> str:
    if isinstance(reward, dict):
        return ", ".join(f"{name} {value:.3g}" for name, value in reward.items())
    return f"{reward:.3g}"


def _shorten(text: str) -> str:
    omitted = len(text) - MAX_CHARACTERS
    return (
        text
        if omitted <= 0
        else f"{text[: MAX_CHARACTERS // 2]} ... {omitted} characters ... {text[-MAX_CHARACTERS // 2 :]}"
    )
