"""Resolution of names of models on a Hugging Face hub, `owner/name` and `owner/name@REVISION`, to folders.

Every config field and argument for a model folder accepts such a name. The command that starts a run replaces it by
the folder of the snapshot, whose name contains the commit, and stores that folder in the run's config.yaml.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from rlsys.config import Config, load_config
from rlsys.config.shipped import exists, find_model
from rlsys.core.hub import fetch_snapshot, snapshot_name
from rlsys.core.model_folder import WEIGHT_SUFFIXES, check_files

_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(\S+))?", re.ASCII)
_NOT_READ = [f"*{suffix}" for suffix in sorted(WEIGHT_SUFFIXES - {".safetensors"})] + ["*/*.safetensors"]
"""Patterns of weights in formats or subfolders that rlsys does not read."""
_CONFIG, _MODEL, _TEACHER = "config.yaml", "model.path", "algo.teacher."


def find_folder(path: Path, field: str, *, weights: bool = True, commit: str | None = None) -> Path:
    """Return the model folder for `path`: an existing folder, a shipped one, or the snapshot of a hub's model.

    Args:
        path: A path, or `owner/name[@REVISION]`. An existing path takes precedence.
        field: Config field or command-line option that contains `path`, for errors.
        weights: Whether to fetch the weights, besides config.json, tokenizer and templates.
        commit: Commit of the snapshot if `path` has no revision; None: the newest.

    Raises:
        UserError: The model is not available, or its folder contains links to files outside of it.
    """
    path = find_model(path)
    match = _NAME.fullmatch(str(path))
    if match is not None and not exists(path):
        excluded = _NOT_READ if weights else [*_NOT_READ, "*.safetensors"]
        path = fetch_snapshot(field, match[1], match[2] or commit, "model", excluded)
    check_files(path)
    return path


def pin_models(config: Config, *, weights: bool = True) -> Config:
    """Return the config with each name of a model on a hub replaced by the folder of its snapshot.

    A name without a revision gets the commit with which the run in `run.dir` started, or the newest commit if there
    is no such run.

    Args:
        config: The config.
        weights: Whether to fetch the weights.

    Raises:
        UserError: A model is not available.
    """
    file = config.run.dir / _CONFIG
    recorded_folders = _folders(load_config(file)) if file.is_file() else {}

    def resolve(path: Path, field: str) -> Path:
        name, _, commit = (snapshot_name(recorded_folders.get(field, Path())) or "").partition("@")
        return find_folder(path, field, weights=weights, commit=commit if str(path) == name else None)

    folders = {field: resolve(path, field) for field, path in _folders(config).items()}
    model = config.model.model_copy(update={"path": folders[_MODEL]})
    algo = config.algo
    if (teacher := algo.teacher) is not None:
        by_source = {source: folders[f"{_TEACHER}by_source.{source}"] for source in teacher.by_source}
        changes = {"path": folders[f"{_TEACHER}path"], "by_source": by_source}
        algo = algo.model_copy(update={"teacher": teacher.model_copy(update=changes)})
    return config.model_copy(update={"model": model, "algo": algo})


def model_overrides(config: Config) -> list[str]:
    """Return overrides that set the model folders of `config` in another process that reads the same config file."""
    overrides = [f"model.path={json.dumps(str(config.model.path))}"]
    if (teacher := config.algo.teacher) is not None:
        folders = teacher.model_dump(mode="json", include={"path", "by_source"})
        overrides.append(f"algo.teacher={json.dumps(folders)}")
    return overrides


def _folders(config: Config) -> dict[str, Path]:
    """Return the path of each model of a run, by config field."""
    teacher = config.algo.teacher.folders if config.algo.teacher is not None else {}
    return {_MODEL: config.model.path, **{f"{_TEACHER}{field}": path for field, path in teacher.items()}}
