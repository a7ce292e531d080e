"""Venvs with packages that rlsys does not depend on, created once per machine in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path


def venv(name: str, *packages: str) -> Path:
    """Return the Python of a venv with exactly these requirements. Create the venv if it does not exist."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlsys-venvs"
    home.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(repr((sys.version_info[:2], packages)).encode()).hexdigest()[:8]
    folder = home / f"{name}-{key}"
    with (home / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--no-compile"]
            process = subprocess.run([*pip, *packages], capture_output=True, text=True)
            assert process.returncode == 0, f"{packages} do not install: {process.stderr[-2000:]}"
            (folder / "complete").touch()
    return folder / "bin/python"
