"""Shipped files, by name: experiment configs, recipes and the small model of the quickstart.

In a checkout they are the folder `configs/`; a wheel contains a copy in the package (setup.py). A name is a path in
that folder without `.yaml`: `quickstart`, `algorithms/dapo`. The path of an existing file takes precedence.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from rlsys.core.errors import UserError

_CHECKOUT = Path(__file__).parents[2] / "configs"
_PREFIX = "configs"


def folder() -> Path:
    """Return the folder of shipped files on this machine."""
    return _CHECKOUT if _CHECKOUT.is_dir() else Path(__file__).parents[1] / "shipped"


def names() -> list[str]:
    """Return the names of all configs, in alphabetical order."""
    return sorted(str(p.relative_to(folder()).with_suffix("")) for p in folder().rglob("*.yaml"))


def find_config(path: Path) -> Path:
    """Return the file at `path`, or the shipped config with this name.

    Raises:
        UserError: neither exists.
    """
    if exists(path) and not path.is_dir():
        return path
    shipped_names = names()
    name = path.with_suffix("") if path.suffix in (".yaml", ".yml") else path
    name = name.relative_to(_PREFIX) if name.parts[:1] == (_PREFIX,) else name
    if str(name) in shipped_names:
        return folder() / f"{name}.yaml"
    if exists(path):
        config_file = path / "config.yaml"
        if exists(config_file):
            raise UserError(f"{path}: a folder; did you mean {config_file}?")
        raise UserError(
            f"{path}: a folder; expected a YAML file, or one of the shipped configs: "
            f"{', '.join(shipped_names[:3])}, ..."
        )
    local_files = [str(p) for pattern in ("*.yaml", "*/*.yaml") for p in Path().glob(pattern)]
    similar_names = difflib.get_close_matches(str(path), local_files, n=1, cutoff=0.8)
    similar_names = similar_names or difflib.get_close_matches(str(name), shipped_names, n=1, cutoff=0.6)
    hint = f"; did you mean {similar_names[0]}?" if similar_names else ""
    raise UserError(f"{path}: no such file, and no shipped config of this name{hint}")


def find_model(path: Path) -> Path:
    """Return `path`, or the shipped folder if it starts with `configs/` and is not in the working folder."""
    if path.parts[:1] != (_PREFIX,) or exists(path):
        return path
    shipped = folder() / path.relative_to(_PREFIX)
    return shipped if exists(shipped) else path


def exists(path: Path) -> bool:
    """Return whether the path exists; False for an invalid name, which the reader of the file reports."""
    try:
        return path.exists()
    except OSError:
        return False
