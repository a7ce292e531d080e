"""Commands for a new project.

`rlsys new` writes a folder with a config. `rlsys try` generates and scores responses to the first prompts of a run.
"""

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
from rlsys.cli.cluster import Add
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


class Supervise(Protocol):
    """Type of rlsys.cli.main.supervise."""

    def __call__(
        self, config: Config, make_plan: Callable[[Backend], LaunchPlan], *, use_stderr: bool = False
    ) -> None: ...


MAX_CHARACTERS = 800
"""Maximum number of characters of a text that are printed."""


def add_project_commands(add: Add, supervise: Supervise, check_plugins: Callable[[Config], None]) -> None:
    """Add `rlsys new` and `rlsys try`."""
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
    """Run `rlsys new`.

    It writes one of three folders: with --model a config for that model, with --data a config for these data,
    otherwise the starter project.
    """
    if args.model is not None:
        return new_for_model(args)
    if args.gpus is not None:
        raise UserError(f"--gpus {args.gpus}: expected together with --model FOLDER")
    config = args.folder / "config.yaml"
    if args.data is not None:
        write_data_config(args.folder, data_section(args.data, args.reward, args.heldout))
        print(f"  {config}\nnext: rlsys try {config}\n      rlsys train {config}")
        return 0
    for option in ("reward", "heldout"):
        if (value := getattr(args, option)) is not None:
            raise UserError(f"--{option} {value}: expected together with --data FILE")
    for path in write_starter(args.folder):
        print(f"  {path}")
    print(f"next: rlsys try {config}\n      rlsys train {config}")
    print(f"      python -m pytest {args.folder}    (pip install pytest)")
    return 0


def new_for_model(args: argparse.Namespace) -> int:
    """Write NAME/config.yaml, with a recommended value for each field that depends on the model or the machine.

    Raises:
        UserError: an option is invalid, the model cannot be used, or it does not fit this machine.
    """
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
            raise UserError(f"--model {args.model}: {problems[0]}; for a machine with N GPUs use --gpus N")
    sections["model"]["path"] = replace(sections["model"]["path"], value=str(args.model))
    _limit_evaluation(recommendation)
    config = write_config(args.folder, sections, data)
    print(f"  {config}")
    if args.gpus is None:
        print(f"for {f'the {gpus} GPUs' if gpus else 'the CPU'} of this host; --gpus N: for N GPUs")
    print(f"next: rlsys explain {config}\n      rlsys rehearse {config}\n      rlsys train {config}")
    return 0


def _limit_evaluation(recommendation: Recommendation) -> None:
    """Limit eval.prompts to the number of held-out prompts. If the data cannot be read, print a warning."""
    evaluation = recommendation.sections["eval"]
    try:
        count = heldout_count(recommendation.config)
    except UserError as e:  # the data may need data.keys, which the user sets in the new config
        print(f"warning: {e}; eval.prompts = {evaluation['prompts'].value} is not checked")
        return
    if count is not None and count < evaluation["prompts"].value:
        evaluation["prompts"] = Value(count, "all held-out prompts")


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
    """Create a new folder RUN-try-N beside the run folder, because only a run may use its run folder."""
    for number in itertools.count(1):
        folder = run_dir.with_name(f"{run_dir.name}-try-{number}")
        with disk_errors(folder, UserError), contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def show(entries: list[dict[str, Any]], console: Console) -> None:
    """Print prompts, responses and rewards, then the problems that may prevent learning.

    Args:
        entries: content of the file that rlsys.evaluation.tryout writes.
        console: output.
    """
    for entry in entries:
        console.print(Rule(f"prompt, {entry['tokens']} tokens", align="left"))
        console.print(escape(_shorten(entry["prompt"])), highlight=False)
        for sample in entry["samples"]:
            reward = sample["reward"]
            text = f"reward {_format(reward)}" if reward is not None else f"NO REWARD: {sample['reason']}"
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
    """Yield a line about the rewards, and one line for each problem."""
    samples = [s for entry in entries for s in entry["samples"]]
    rewards = [_sum(s["reward"]) for s in samples if s["reward"] is not None]
    if not rewards:
        yield "No sample has a reward: a run would censor all of them and stop."
        return
    yield f"mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} samples"
    if missing := len(samples) - len(rewards):
        yield f"{missing} of {len(samples)} samples have no reward: a run censors these."
    if not any(_has_signal(entry) for entry in entries):
        yield (
            "All samples of each prompt have the same reward, which gives no learning signal. If that holds for more "
            "prompts, the task is too hard or too easy, or the reward does not parse the responses."
        )
    elif not any(s["right"] for s in samples):
        yield (
            "No sample counts as correct in an evaluation, which requires a reward (or first named part) of at least "
            f"1 (docs/own-task.md); the highest reward here is {max(rewards):.3g}."
        )
    if truncated := sum(s["status"] == "truncated" for s in samples):
        yield f"{truncated} of {len(samples)} samples were truncated at rollout.max_response_tokens."


def _has_signal(entry: dict[str, Any]) -> bool:
    """Return whether the samples of a prompt have different rewards."""
    return len({_sum(s["reward"]) for s in entry["samples"] if s["reward"] is not None}) > 1


def _sum(reward: float | dict[str, float]) -> float:
    """Return a reward as one number: the sum of named rewards."""
    return sum(reward.values()) if isinstance(reward, dict) else reward


def _format(reward: float | dict[str, float]) -> str:
    """Return a reward as text: a number, or each named reward."""
    if isinstance(reward, dict):
        return ", ".join(f"{name} {value:.3g}" for name, value in reward.items())
    return f"{reward:.3g}"


def _shorten(text: str) -> str:
    """Return the text, without its middle if it is longer than MAX_CHARACTERS."""
    omitted = len(text) - MAX_CHARACTERS
    if omitted <= 0:
        return text
    return f"{text[: MAX_CHARACTERS // 2]} ... {omitted} characters ... {text[-MAX_CHARACTERS // 2 :]}"
