"""The commands of `rlsys` about models at rest: convert, and what eval measures. Heavy imports come when needed."""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rlsys.config import Config, load_config
from rlsys.convert.hub import find_folder, pin_models
from rlsys.core.errors import UserError
from rlsys.obs.metrics import FILE_NAME as METRICS_FILE

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
_OF_A_HUB = "owner/name[@REVISION] of a hub"
_SIZES = {
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "ep": "expert parallel size",
    "etp": "tensor parallel size of the experts; --tp when not given",
}


def add_model_commands(add: Add) -> None:
    convert = add("convert", convert_to_megatron, "turn a model's folder into a Megatron checkpoint, or back")
    kinds = convert.add_subparsers(required=True, metavar="hf-to-megatron|megatron-to-hf|verify")
    kind = kinds.add_parser("hf-to-megatron", help="a checkpoint with one file for each rank of a layout")
    kind.set_defaults(run_command=convert_to_megatron)
    kind.add_argument(
        "--hf",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"Hugging Face folder, or {_OF_A_HUB}",
    )
    kind.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    for name, what in _SIZES.items():
        kind.add_argument(f"--{name}", type=int, metavar="N", help=what)
    kind = kinds.add_parser("megatron-to-hf", help="a Hugging Face folder that serves by itself")
    kind.set_defaults(run_command=convert_to_hf)
    kind.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint, or run folder (its newest one)",
    )
    kind.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    kind = kinds.add_parser("verify", help="compare two models bit for bit, of either kind")
    kind.set_defaults(run_command=compare)
    for name in ("a", "b"):
        kind.add_argument(
            name,
            type=Path,
            metavar=name.upper(),
            help=f"Hugging Face folder, checkpoint, run, or {_OF_A_HUB}",
        )


def convert_to_megatron(args: argparse.Namespace) -> int:
    from rlsys.trainer.checkpoints.conversion import hf_to_megatron

    layout = {name: value for name in _SIZES if (value := getattr(args, name)) is not None}
    folder = find_folder(args.hf, "--hf")
    with _bar(f"{args.hf} -> {args.out}") as advance:
        done = hf_to_megatron(folder, args.out, layout, advance)
    print(f"{args.out}: {done.tensors} tensors, {done.elements:,} parameters")
    if done.carried:
        print(f"carried along unchanged: {done.carried} tensors that are not trained")
    return 0


def convert_to_hf(args: argparse.Namespace) -> int:
    from rlsys.trainer.checkpoints.conversion import megatron_to_hf

    with _bar(f"{args.checkpoint} -> {args.out}") as advance:
        done = megatron_to_hf(args.checkpoint, args.out, advance)
    print(f"{args.out}: {done.tensors} tensors, {done.elements:,} parameters")
    return 0


def compare(args: argparse.Namespace) -> int:
    """RunError (exit code 1) when the models differ."""
    from rlsys.trainer.checkpoints.conversion import verify

    a, b = (find_folder(path, name) for name, path in (("A", args.a), ("B", args.b)))
    with _bar(f"{args.a} = {args.b}?") as advance:
        done = verify(a, b, advance)
    print(f"bit-equal: {done.tensors} tensors, {done.elements:,} parameters")
    return 0


@dataclass(frozen=True)
class Subject:
    """What `rlsys eval` is to measure. `config`: the target's. `model`: a model folder, or a checkpoint.

    `folder`: the evaluation's own, new one, with its logs and its figures.
    """

    config: Config
    model: Path
    folder: Path

    @property
    def name(self) -> str:
        return str(self.model)

    @contextmanager
    def served(self) -> Iterator[Config]:
        """The config of the evaluation. A checkpoint is converted for it, and the copy deleted afterwards."""
        made, model = self.folder.with_name(self.folder.name + "-model"), self.model
        if not any(model.glob("*.safetensors")):
            from rlsys.trainer.checkpoints.conversion import megatron_to_hf

            with _bar(f"{model} -> {made}") as advance:
                megatron_to_hf(model, made, advance)
            model = made
        try:
            yield self.config.model_copy(
                update={
                    "run": self.config.run.model_copy(update={"dir": self.folder}),
                    "model": self.config.model.model_copy(update={"path": model, "fp8": "none"}),
                }
            )
        finally:
            shutil.rmtree(made, ignore_errors=True)


def find_subject(target: Path, checkpoint: Path | None, overrides: Sequence[str]) -> Subject:
    """Raises UserError when there is no such config, run or model."""
    run = target if target.is_dir() else None
    if run is not None and not (run / METRICS_FILE).is_file():
        raise UserError(_no_run(run))
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
        raise UserError(f"{model}: no such folder")
    root = (run or config.run.dir) / "evaluations"
    number = next(n for n in itertools.count(1) if not (root / f"{model.name}-{n}").exists())
    return Subject(config, model, root / f"{model.name}-{number}")


def _no_run(folder: Path) -> str:
    """What to say of a folder that is no run: which command it may be for."""
    if (folder / "manifest.json").is_file() and (folder.parent.parent / "config.yaml").is_file():
        return f"{folder}: a checkpoint; rlsys eval {folder.parent.parent} --checkpoint {folder}"
    if (folder / "config.json").is_file():
        return f"{folder}: a model, which has no prompts of its own; rlsys eval CONFIG --checkpoint {folder}"
    if (folder / "config.yaml").is_file():
        return f"{folder}: not a run, or one that has not begun; did you mean {folder / 'config.yaml'}?"
    return f"{folder}: not a run, or one that has not begun: no {METRICS_FILE} in it"


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
