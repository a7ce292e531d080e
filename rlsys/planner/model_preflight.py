"""What can be known to be wrong before a process starts: the model folder, and layouts that do not fit it."""

from __future__ import annotations

import os
from pathlib import Path

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import (
    check_asked,
    check_layout,
    check_teacher,
    check_vocabulary,
    read_vocabulary,
    trained_model,
)
from rlsys.convert.folder import find_tensors
from rlsys.core.devices import VARIABLE, have_cuda, visible_devices
from rlsys.core.errors import UserError
from rlsys.core.model_folder import vocabulary_files


def check_gpus(config: Config) -> None:
    """Raises UserError where the run plans GPUs on this host, and it has none."""
    if config.launch.backend != "local" or not config.launch.gpus_per_node or have_cuda():
        return
    hidden = visible_devices() == []
    reason = f"{VARIABLE} = {os.environ[VARIABLE]!r} hides all" if hidden else "no NVIDIA driver is here"
    raise UserError(
        f"launch.gpus_per_node = {config.launch.gpus_per_node}, but {reason}; expected 0, or a host with GPUs"
    )


def check_model(config: Config) -> None:
    """Raises UserError when model.path is no model folder that can be trained and served: a file is missing or cut
    short, a tensor is missing or has another shape, the architecture is unknown, or what the config asks for does not
    fit it. The same of algo.teacher, which must have the same vocabulary.
    """
    path = config.model.path
    hf = read_model(config)
    weights = ("*.safetensors", ".metadata")
    if not any(any(path.glob(pattern)) for pattern in weights):
        raise UserError(f"model.path = {path}: no weights in it ({' or '.join(weights)})")
    if not vocabulary_files(path):
        raise UserError(
            f"model.path = {path}: no tokenizer in it (tokenizer.json), and no vocabulary that AutoTokenizer reads"
        )
    check_tensors(config, hf)


def check_tensors(config: Config, hf: HFConfig) -> None:
    """Raises UserError when tensors of model.path are not those of its config.json, or its teacher does not fit; of a
    folder without *.safetensors, a checkpoint or a config.json alone, nothing can be said."""
    if any(config.model.path.glob("*.safetensors")):
        find_tensors(config.model.path, hf)
    if (teacher := config.algo.teacher) is not None:
        for field, folder in teacher.folders.items():
            check_folder(folder, f"algo.teacher.{field}")
            if teacher.engine is not None:  # any model that SGLang serves
                check_vocabulary(config, hf, read_vocabulary(folder), folder)
                if teacher.engine == "own" and (folder / ".metadata").is_file():
                    raise UserError(
                        f"algo.teacher.engine = own: {folder} is a Megatron checkpoint, with which an engine begins "
                        "without weights; expected a Hugging Face folder"
                    )
                continue
            other = HFConfig.read(folder)
            check_teacher(config, hf, other, folder)
            find_tensors(folder, other)


def read_model(config: Config) -> HFConfig:
    """What config.json says, checked against the layout. Raises UserError; needs no weights."""
    check_folder(config.model.path)
    hf = trained_model(config)
    check_layout(config, hf)
    check_asked(config, hf)
    return hf


def check_folder(path: Path, field: str = "model.path") -> None:
    """Raises UserError unless `path` looks like a model folder."""
    if not path.exists():
        raise UserError(f"{field} = {path}: no such folder")
    if not path.is_dir():
        raise UserError(f"{field} = {path}: not a folder; expected a Hugging Face model folder")
    if not (path / "config.json").is_file():
        raise UserError(f"{field} = {path}: not a Hugging Face model folder: no config.json in it")
