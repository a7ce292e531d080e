"""PYTHONPATH of a child process."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*folders: Path | str) -> str:
    """Return a PYTHONPATH of these folders and this process's PYTHONPATH, which may provide packages."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
