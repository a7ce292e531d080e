"""`rlsys convert`, and the selection of the model that `rlsys eval` evaluates. Imports torch only when needed."""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rlsys.cli.cluster import Add
from rlsys.config import Config, load_config
from rlsys.convert.hub import find_folder, pin_models
from rlsys.core.errors import UserError
from rlsys.core.run_files import EVALUATIONS_FOLDER
from rlsys.obs.metrics import FILE_NAME as METRICS_FILE

_HUB_ID = "owner/name[@REVISION] of a hub"
_SIZES = {
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "ep": "expert parallel size",
    "etp": "tensor parallel size of the experts (default: --tp)",
}


def add_model_commands(add: Add) -> None:
    """Add `rlsys convert`."""
    convert = add("convert", convert_to_megatron, "convert a model folder to a Megatron checkpoint, or back")
    kinds = convert.add_subparsers(required=True, metavar="hf-to-megatron|megatron-to-hf|verify")
    kind = kinds.add_parser("hf-to-megatron", help="write a Megatron checkpoint from a Hugging Face folder")
    kind.set_defaults(run_command=convert_to_megatron)
    kind.add_argument(
        "--hf",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"Hugging Face folder, or {_HUB_ID}",
    )
    kind.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    for name, help_text in _SIZES.items():
        kind.add_argument(f"--{name}", type=int, metavar="N", help=help_text)
    kind = kinds.add_parser("megatron-to-hf", help="write a complete Hugging Face folder from a checkpoint")
    kind.set_defaults(run_command=convert_to_hf)
    kind.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint, or run folder (newest checkpoint)",
    )
    kind.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    kind = kinds.add_parser("verify", help="compare two models of either format bit for bit")
    kind.set_defaults(run_command=compare)
    for name in ("a", "b"):
        kind.add_argument(
            name,
            type=Path,
            metavar=name.upper(),
            help=f"Hugging Face folder, checkpoint, run folder, or {_HUB_ID}",
        )


def convert_to_megatron(args: argparse.Namespace) -> int:
    """Run `rlsys convert hf-to-megatron`."""
    from rlsys.trainer.checkpoints.conversion import hf_to_megatron

    layout = {name: value for name in _SIZES if (value := getattr(args, name)) is not None}
    folder = find_folder(args.hf, "--hf")
    with _bar(f"{args.hf} -> {args.out}") as advance:
        result = hf_to_megatron(folder, args.out, layout, advance)
    print(f"{args.out}: {result.tensors} tensors, {result.elements:,} parameters")
    if result.carried:
        print(f"copied unchanged: {result.carried} tensors that are not trained")
    return 0


def convert_to_hf(args: argparse.Namespace) -> int:
    """Run `rlsys convert megatron-to-hf`."""
    from rlsys.trainer.checkpoints.conversion import megatron_to_hf

    with _bar(f"{args.checkpoint} -> {args.out}") as advance:
        result = megatron_to_hf(args.checkpoint, args.out, advance)
    print(f"{args.out}: {result.tensors} tensors, {result.elements:,} parameters")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Run `rlsys convert verify`.

    Raises:
        RunError: the models differ (exit code 1).
    """
    from rlsys.trainer.checkpoints.conversion import verify

    a, b = (find_folder(path, name) for name, path in (("A", args.a), ("B", args.b)))
    with _bar(f"{args.a} = {args.b}?") as advance:
        result = verify(a, b, advance)
    print(f"bit-equal: {result.tensors} tensors, {result.elements:,} parameters")
    return 0


@dataclass(frozen=True)
class Subject:
    """Target of `rlsys eval`.

    Attributes:
        config: config of the target.
        model: model folder or checkpoint.
        folder: new folder for logs and metrics of the evaluation.
    """

    config: Config
    model: Path
    folder: Path

    @property
    def name(self) -> str:
        """Name of the model in the result."""
        return str(self.model)

    @property
    def step(self) -> int:
        """Train step of a checkpoint or an exported folder; 0 for another model."""
        match = re.fullmatch(r"step-(\d+)", self.model.name)
        return int(match[1]) if match else 0

    @contextmanager
    def serving_config(self) -> Iterator[Config]:
        """Yield the config of the evaluation.

        A checkpoint is converted to a temporary model folder, which is deleted at the end of the context.
        """
        converted, model = self.folder.with_name(self.folder.name + "-model"), self.model
        if not any(model.glob("*.safetensors")):
            from rlsys.trainer.checkpoints.conversion import megatron_to_hf

            with _bar(f"{model} -> {converted}") as advance:
                megatron_to_hf(model, converted, advance)
            model = converted
        try:
            yield self.config.model_copy(
                update={
                    "run": self.config.run.model_copy(update={"dir": self.folder}),
                    "model": self.config.model.model_copy(update={"path": model, "fp8": "none"}),
                }
            )
        finally:
            shutil.rmtree(converted, ignore_errors=True)


def find_subject(target: Path, checkpoint: Path | None, overrides: Sequence[str]) -> Subject:
    """Return the subject of an evaluation.

    Args:
        target: config file or run folder.
        checkpoint: model folder, id on a hub, or checkpoint; None: the newest checkpoint of the run, or the config's
            model.
        overrides: overrides of the target's config fields.

    Raises:
        UserError: there is no such config, run or model.
    """
    run = target if target.is_dir() else None
    if run is not None and not (run / METRICS_FILE).is_file():
        raise UserError(_not_a_run_error(run))
    config = load_config(target / "config.yaml" if run else target, overrides)
    config = pin_models(config, weights=checkpoint is None)
    if checkpoint is not None:
        model = find_folder(checkpoint, "--checkpoint")
    elif run is not None:
        from rlsys.trainer.checkpoints.conversion import find_checkpoint

        model = find_checkpoint(run)
    else:
        model = config.model.path
    if not model.is_dir():
        raise UserError(f"{model}: no such folder; expected a model folder or a checkpoint")
    root = (run or config.run.dir) / EVALUATIONS_FOLDER
    number = next(n for n in itertools.count(1) if not (root / f"{model.name}-{n}").exists())
    return Subject(config, model, root / f"{model.name}-{number}")


def _not_a_run_error(folder: Path) -> str:
    """Return the error for a target that is not a run's folder, with a command that may be meant."""
    if (folder / "manifest.json").is_file() and (folder.parent.parent / "config.yaml").is_file():
        return f"{folder}: a checkpoint; use rlsys eval {folder.parent.parent} --checkpoint {folder}"
    if (folder / "config.json").is_file():
        return f"{folder}: a model folder, which has no prompts; use rlsys eval CONFIG --checkpoint {folder}"
    if (folder / "config.yaml").is_file():
        return f"{folder}: not a run, or one that has not started; did you mean {folder / 'config.yaml'}?"
    return f"{folder}: not a run, or one that has not started: contains no {METRICS_FILE}"


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yield the function that sets (completed, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda completed, total: progress.update(task, completed=completed, total=total)
