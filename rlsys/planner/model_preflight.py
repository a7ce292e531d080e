"""Checks before any process starts: GPUs of this host, the model folder, and the layout for the model."""

from __future__ import annotations

import os
from pathlib import Path

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import (
    check_layout,
    check_requirements,
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
    """Check that this host has GPUs, if a local run needs them.

    Raises:
        UserError: the host has no visible GPU.
    """
    if config.launch.backend != "local" or not config.launch.gpus_per_node or have_cuda():
        return
    hidden = visible_devices() == []
    reason = (
        f"{VARIABLE} = {os.environ[VARIABLE]!r} hides all GPUs"
        if hidden
        else "this host has no NVIDIA driver"
    )
    raise UserError(
        f"launch.gpus_per_node = {config.launch.gpus_per_node}, but {reason}; expected 0, or a host with GPUs"
    )


def check_model(config: Config) -> None:
    """Check that this config can train and serve model.path, and that its teachers have the same vocabulary.

    Raises:
        UserError: a file is missing or truncated, a tensor is missing or has another shape, the architecture is
            unknown, or the config does not fit the model.
    """
    path = config.model.path
    hf = read_model(config)
    weights = ("*.safetensors", ".metadata")
    if not any(any(path.glob(pattern)) for pattern in weights):
        raise UserError(f"model.path = {path}: contains no weights; expected {' or '.join(weights)}")
    if not vocabulary_files(path):
        raise UserError(
            f"model.path = {path}: contains no vocabulary; expected tokenizer.json, or files that AutoTokenizer reads"
        )
    check_tensors(config, hf)


def check_tensors(config: Config, hf: HFConfig) -> None:
    """Check the tensors of model.path and of the teachers' folders against their config.json.

    A model.path without *.safetensors, such as a checkpoint, is not checked. Of a teacher with an engine, only the
    folder and the vocabulary are checked.

    Raises:
        UserError: tensors, a vocabulary or a folder do not fit.
    """
    if any(config.model.path.glob("*.safetensors")):
        find_tensors(config.model.path, hf)
    if (teacher := config.algo.teacher) is not None:
        for field, folder in teacher.folders.items():
            check_folder(folder, f"algo.teacher.{field}")
            if teacher.engine is not None:  # any model that SGLang serves
                check_vocabulary(config, hf, read_vocabulary(folder), folder)
                if teacher.engine == "own" and (folder / ".metadata").is_file():
                    raise UserError(
                        f"algo.teacher.engine = own: {folder} is a Megatron checkpoint, from which an engine cannot "
                        "load weights; expected a Hugging Face folder"
                    )
                continue
            teacher_hf = HFConfig.read(folder)
            check_teacher(config, hf, teacher_hf, folder)
            find_tensors(folder, teacher_hf)


def read_model(config: Config) -> HFConfig:
    """Read config.json of model.path, and check that the layout and the config fit the model, without its weights.

    Raises:
        UserError: the folder or the architecture is unknown, or the layout or the config does not fit the model.
    """
    check_folder(config.model.path)
    hf = trained_model(config)
    check_layout(config, hf)
    check_requirements(config, hf)
    return hf


def check_folder(path: Path, field: str = "model.path") -> None:
    """Check that `path` is a folder with a config.json.

    Raises:
        UserError: it is not; the message starts with `field`.
    """
    if not path.exists():
        raise UserError(f"{field} = {path}: no such folder")
    if not path.is_dir():
        raise UserError(f"{field} = {path}: not a folder; expected a Hugging Face model folder")
    if not (path / "config.json").is_file():
        raise UserError(f"{field} = {path}: contains no config.json; expected a Hugging Face model folder")
