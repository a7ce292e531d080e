"""Starts a service in any Python: `PYTHON rlsys/environments/start.py CONNECTOR ...`, started by services.py.

rlsys need not be installed there. Only this folder is made importable, under its own name, so nothing of what rlsys
runs with hides what the environment's venv has.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _importable(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]  # ours are no packages of its
    _importable("rlsys", here.parent)
    _importable("rlsys.environments", here)
    from rlsys.environments.serve import main

    main()
