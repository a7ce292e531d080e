"""What comes with rlsys: experiment configs, recipes and the small model of the quickstart, by their names.

In a checkout they are the folder `configs/`; a wheel carries a copy of it in the package (setup.py). A name is a path
in that folder without `.yaml`: `quickstart`, `algorithms/dapo`. A path of a file that is there comes first.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from rlsys.core.errors import UserError

_CHECKOUT = Path(__file__).parents[2] / "configs"
_PREFIX = "configs"


def folder() -> Path:
    """Where they are on this machine."""
    return _CHECKOUT if _CHECKOUT.is_dir() else Path(__file__).parents[1] / "shipped"


def names() -> list[str]:
    """Of all configs, in alphabetical order."""
    return sorted(str(p.relative_to(folder()).with_suffix("")) for p in folder().rglob("*.yaml"))


def find_config(path: Path) -> Path:
    """The file at `path`, or the shipped config of this name. Raises UserError when there is neither."""
    if exists(path) and not path.is_dir():
        return path
    known = names()
    name = path.with_suffix("") if path.suffix in (".yaml", ".yml") else path
    name = name.relative_to(_PREFIX) if name.parts[:1] == (_PREFIX,) else name
    if str(name) in known:
        return folder() / f"{name}.yaml"
    if exists(path):
        inside = path / "config.yaml"
        if exists(inside):
            raise UserError(f"{path}: a folder; did you mean {inside}?")
        raise UserError(
            f"{path}: a folder; expected a YAML file, or one of the shipped configs: {', '.join(known[:3])}, ..."
        )
    here = [str(p) for pattern in ("*.yaml", "*/*.yaml") for p in Path().glob(pattern)]
    near = difflib.get_close_matches(str(path), here, n=1, cutoff=0.8)
    near = near or difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{path}: no such file, and no shipped config of this name{hint}")


def find_model(path: Path) -> Path:
    """`path`, or the shipped folder where it begins with `configs/` and is not in the working folder."""
    if path.parts[:1] != (_PREFIX,) or exists(path):
        return path
    shipped = folder() / path.relative_to(_PREFIX)
    return shipped if exists(shipped) else path


def exists(path: Path) -> bool:
    """Also of what no file system takes for a name: whoever reads the file tells that."""
    try:
        return path.exists()
    except OSError:
        return False
