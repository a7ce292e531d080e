"""Commands for one's own run: `rlsys new` writes a folder that trains, `rlsys try` shows what a run would see."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from launch.backends import Backend
from launch.plan import LaunchPlan, build_client_plan
from launch.ports import choose_ports
from rlsys.cli.project_template import write_starter
from rlsys.config import Config, add_config, load_config
from rlsys.core.errors import RunError, UserError, disk_errors
from rlsys.engine.launch_args import engine_command
from rlsys.evaluation.tryout import FILE_NAME
from rlsys.planner.layout import lay_out
from rlsys.planner.model_preflight import check_model

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


class Supervise(Protocol):
    """rlsys.cli.main.supervise."""

    def __call__(
        self, config: Config, make_plan: Callable[[Backend], LaunchPlan], *, aside: bool = False
    ) -> None: ...


SHOWN = 800
"""Characters of a text that are printed, at most."""


def add_own(add: Add, supervise: Supervise, check_plugins: Callable[[Config], None]) -> None:
    sub = add("new", new, "write a small folder of your own that trains at once: config, data, reward, test")
    sub.add_argument("folder", type=Path, metavar="NAME", help="new folder")
    sub = add(
        "try",
        lambda args: try_out(args, supervise, check_plugins),
        "ask the model a run's first prompts, score the answers and show them",
    )
    add_config(sub)
    sub.add_argument("--json", action="store_true", help="print what was found as JSON only")


def new(args: argparse.Namespace) -> int:
    for path in write_starter(args.folder):
        print(f"  {path}")
    config = args.folder / "config.yaml"
    print(f"next: rlsys try {config}\n      rlsys train {config}")
    print(f"      python -m pytest {args.folder}    (pip install pytest)")
    return 0


def try_out(args: argparse.Namespace, supervise: Supervise, check_plugins: Callable[[Config], None]) -> int:
    """Starts an engine or what the config has of them, asks, and takes everything down again."""
    config = load_config(args.config, args.overrides)
    check_model(config)
    check_plugins(config)
    folder = folder_beside(config.run.dir)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    layout = lay_out(config)

    def plan(backend: Backend) -> LaunchPlan:
        ports = choose_ports(config, layout, backend.free_ports)
        return build_client_plan(
            config, layout, backend.nodes, ports, engine_command, "rlsys.evaluation.tryout"
        )

    supervise(config, plan, aside=args.json)
    try:
        found: list[dict[str, Any]] = json.loads((folder / FILE_NAME).read_text())
    except FileNotFoundError:
        raise RunError(
            f"{folder}: the engines were asked, but nothing was written; see {folder / 'logs'}"
        ) from None
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, Console())
    return 0


def folder_beside(run_dir: Path) -> Path:
    """A new folder RUN-try-N: a run's own holds nothing but the run, and what is there already is somebody's."""
    for number in itertools.count(1):
        folder = run_dir.with_name(f"{run_dir.name}-try-{number}")
        with disk_errors(folder, UserError), contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def show(found: list[dict[str, Any]], console: Console) -> None:
    """Prompts as the model gets them, its answers, their rewards; then what would keep a run from learning."""
    for entry in found:
        console.print(Rule(f"prompt, {entry['tokens']} tokens", align="left"))
        console.print(escape(_shortened(entry["prompt"])), highlight=False)
        for sample in entry["samples"]:
            reward = sample["reward"]
            told = f"reward {_number(reward)}" if reward is not None else f"NO REWARD: {sample['reason']}"
            console.print(
                f"[bold]{escape(told)}[/bold], {sample['tokens']} tokens, {sample['status']}", highlight=False
            )
            if "prompt" in sample:
                console.print(escape(f"to {_shortened(sample['prompt'])}"), highlight=False)
            console.print(escape(_shortened(sample["text"])), style="cyan", highlight=False)
    console.print(Rule(align="left"))
    for line in advice(found):
        console.print(escape(line), highlight=False)


def advice(found: list[dict[str, Any]]) -> Iterator[str]:
    """One line for the rewards, and one for each thing that a run would stumble over."""
    samples = [s for entry in found for s in entry["samples"]]
    scored = [_sum(s["reward"]) for s in samples if s["reward"] is not None]
    if not scored:
        yield "No sample has a reward: a run would censor all of them and stop."
        return
    mixed = [len({_sum(s["reward"]) for s in e["samples"] if s["reward"] is not None}) > 1 for e in found]
    yield f"mean reward {sum(scored) / len(scored):.3f} of {len(scored)} samples"
    if missing := len(samples) - len(scored):
        yield f"{missing} of {len(samples)} samples have no reward: a run censors these."
    if not any(mixed):
        yield (
            "All samples of each prompt have the same reward, and only differences teach. If that stays so with more "
            "prompts, the task is too hard, too easy, or the reward does not read what the model writes."
        )
    if any(mixed) and not any(s["right"] for s in samples):
        yield (
            f"No sample counts as right in an evaluation: that takes a reward of 1 or more, of named parts the first "
            f"(docs/own-task.md); the highest reward here is {max(scored):.3g}."
        )
    if cut := sum(s["status"] == "truncated" for s in samples):
        yield f"{cut} of {len(samples)} samples were cut off at rollout.max_response_tokens."


def _sum(reward: float | dict[str, float]) -> float:
    return sum(reward.values()) if isinstance(reward, dict) else reward


def _number(reward: float | dict[str, float]) -> str:
    if isinstance(reward, dict):
        return ", ".join(f"{name} {value:.3g}" for name, value in reward.items())
    return f"{reward:.3g}"


def _shortened(text: str) -> str:
    left = len(text) - SHOWN
    return text if left <= 0 else f"{text[: SHOWN // 2]} ... {left} characters ... {text[-SHOWN // 2 :]}"
