"""Runs a module of rlsys in any Python: `PYTHON rlsys/venv_runner/run.py rlsys.environments.serve ARGUMENT ...`.

rlsys need not be installed there. This file makes only the package rlsys importable, so the packages of rlsys' own
environment do not shadow those of that Python. Therefore the module, and what it imports of rlsys, may use only the
standard library. This file has its own folder, because Python first searches the script's folder for modules.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def _make_importable(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    sys.path[:] = [
        p for p in sys.path if Path(p or ".").resolve() != folder
    ]  # this folder must not be searched for packages
    _make_importable("rlsys", folder.parent)
    module = sys.argv.pop(1)
    importlib.import_module(module).main()
