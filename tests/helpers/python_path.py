"""PYTHONPATH of a child process."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*folders: Path | str) -> str:
    """The folders before those of this process: packages of this environment may come by PYTHONPATH."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
