"""Lookup of shipped files by name: experiment configs, recipes and the small model of the quickstart.

In a checkout, they are the folder `configs/`; a wheel contains a copy in the package (setup.py). The name of a config
is its path in this folder without `.yaml`, such as `quickstart` or `algorithms/dapo`. An existing file with this path
takes precedence.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from rlsys.core.errors import UserError

_CHECKOUT = Path(__file__).parents[2] / "configs"
_PREFIX = "configs"


def folder() -> Path:
    """Return the folder with the shipped files."""
    return _CHECKOUT if _CHECKOUT.is_dir() else Path(__file__).parents[1] / "shipped"


def names() -> list[str]:
    """Return the names of all shipped configs in alphabetical order."""
    return sorted(str(p.relative_to(folder()).with_suffix("")) for p in folder().rglob("*.yaml"))


def find_config(path: Path) -> Path:
    """Return `path` if it is a file, or else the shipped config with this name.

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
    """Return the shipped model folder with the path `configs/...`, unless it exists in the working folder.

    Return another path unchanged.
    """
    if path.parts[:1] != (_PREFIX,) or exists(path):
        return path
    shipped = folder() / path.relative_to(_PREFIX)
    return shipped if exists(shipped) else path


def exists(path: Path) -> bool:
    """Return whether the path exists; False if the name is invalid."""
    try:
        return path.exists()
    except OSError:
        return False
