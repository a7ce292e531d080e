"""Runs a module of rlsys in any Python: `PYTHON rlsys/venv_runner/run.py rlsys.environments.serve ARGUMENT ...`.

rlsys need not be installed there. It is made importable by this file alone, so nothing of what rlsys runs with hides
what that Python has. So the module, and what it imports of rlsys, needs the standard library only. This file has a
folder of its own, because Python looks for modules beside it first.
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
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != folder]  # ours are no packages of its
    _make_importable("rlsys", folder.parent)
    module = sys.argv.pop(1)
    importlib.import_module(module).main()
