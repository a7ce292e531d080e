"""Loading and validation of a `Config` from a YAML file and `a.b=c` overrides."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlsys.config.epochs import resolve_epochs
from rlsys.config.mistakes import ConfigError, explain_error
from rlsys.config.schema import Config
from rlsys.config.shipped import exists, find_config, find_model
from rlsys.core.errors import UserError
from rlsys.core.run_files import CONFIG_FILE
from rlsys.core.yaml_text import dump_yaml, parse_yaml
from rlsys.importers.explain import explain_foreign


def add_config(command: ArgumentParser) -> None:
    """Add the command-line arguments that `load_config` needs."""
    command.add_argument(
        "config", type=Path, metavar="CONFIG", help="YAML file, or the name of a shipped config"
    )
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="values that replace those of the file",
    )


_PARAMETER_OWNERS = {"params": ("source", "traces"), "generator_params": ("generator",)}
"""Field with parameters -> fields in the same section that can name the function with these parameters."""


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `top`.

    If `top` names another plug-in or function than `base`, the parameters of the old one are omitted.
    """
    if "name" in base and "name" in top and base["name"] != top["name"]:
        return top
    merged = dict(base)
    for params, names in _PARAMETER_OWNERS.items():
        if any(name in base and name in top and top[name] != base[name] for name in names):
            merged.pop(params, None)
    for key, value in top.items():
        merged[key] = (
            _merge(merged[key], value)
            if isinstance(value, dict) and isinstance(merged.get(key), dict)
            else value
        )
    return merged


def _parse_yaml(text: str, source: str) -> Any:
    """Parse YAML.

    Args:
        source: start of the error's message: a path, or "override" and the text.

    Raises:
        ConfigError: the text is not valid YAML.
    """
    try:
        return parse_yaml(text, source, position=not source.startswith("override"))
    except UserError as e:
        raise ConfigError(str(e)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the config: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the config is not UTF-8 text") from None
    data = _parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    return data


def read_layers(path: Path, visited: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a config file, merged over the config that its key `base` names, if any.

    Args:
        path: the file.
        visited: files whose `base` led to this one, to detect cycles.

    Returns:
        the merged content, not validated.

    Raises:
        ConfigError: a file cannot be read or is not a mapping, or base files form a cycle.
        UserError: `base` is neither a file relative to this one nor a shipped config.
    """
    path = path.resolve()
    if path in visited:
        raise ConfigError(f"{path}: base files form a cycle: {' -> '.join(p.name for p in (*visited, path))}")
    data = _read_yaml(path)
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base = {base!r}: expected a file name")
    relative = path.parent / base
    base_path = relative if exists(relative) else find_config(Path(base))
    return _merge(read_layers(base_path, (*visited, path)), data)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Convert overrides such as `a.b=1`, whose values are YAML, to nested dicts such as `{"a": {"b": 1}}`.

    Raises:
        ConfigError: an override has another form, or its value is not valid YAML.
    """
    merged: dict[str, Any] = {}
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key or not all(key.split(".")):
            raise ConfigError(f"override {text!r}: expected section.field=value")
        parsed = _parse_yaml(value, f"override {text!r:.200}")
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        merged = _merge(merged, parsed)
    return merged


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge and validate a config.

    Files that the config names are not read, except to count rows for trainer.epochs.

    Args:
        path: a YAML file, or the name of a shipped config (rlsys/config/shipped.py).
        overrides: texts `section.field=value`, applied in this order.

    Raises:
        ConfigError: the config is invalid.
        UserError: the file or its base does not exist.
    """
    data = _merge(read_layers(find_config(path)), parse_overrides(overrides))
    data = _with_shipped(data, "model")
    if isinstance(algo := data.get("algo"), dict):
        data["algo"] = _with_shipped(algo, "teacher")
    try:
        return resolve_epochs(Config.model_validate(data))
    except ValidationError as e:
        raise ConfigError(explain_foreign(e) or explain_error(e, Config)) from None


def load_run_config(run: Path) -> Config:
    """Load the config in a run folder.

    Raises:
        ConfigError: the config is invalid.
        UserError: the config is missing.
    """
    path = run / CONFIG_FILE
    try:
        return load_config(path)
    except ConfigError as e:
        message = str(e).removeprefix(f"{path}: ")
        hint = "; another version of rlsys may have written it" if exists(path) else ""
        raise ConfigError(f"{path}: {message}{hint}") from None


def _with_shipped(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the data with the path of a shipped model in section `name` resolved (find_model)."""
    section = data.get(name)
    if not isinstance(section, dict) or not isinstance(path := section.get("path"), str):
        return data
    return {**data, name: {**section, "path": str(find_model(Path(path)))}}


def dump_config(config: Config) -> str:
    """Return the config as YAML, which load_config can read."""
    return dump_yaml(config.model_dump(mode="json", exclude=None if config.fine_tunes else {"sft"}))
