"""Runs a module of rlsys in any Python: `PYTHON rlsys/venv_runner/run.py rlsys.environments.serve ARGUMENT ...`.

That Python does not need rlsys: this file makes the package rlsys importable, but no other package of rlsys' own
environment, so that none shadows a package of that Python. Therefore the module, and the modules of rlsys that it
imports, may use only the standard library. This file has its own folder, because Python searches the folder of a
script for modules first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def _make_importable(name: str, folder: Path) -> None:
    """Import the package in `folder` as `name`, without adding its parent folder to the search path."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    # Python must not search this folder for modules.
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != folder]
    _make_importable("rlsys", folder.parent)
    module = sys.argv.pop(1)
    importlib.import_module(module).main()
