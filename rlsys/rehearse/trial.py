"""Trial build of the trainer in this environment: its layers are built in a separate process, in seconds."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.imports import module_command
from rlsys.obs.packages import installed_version, mismatches

PACKAGES = ("megatron-core", "torch")
"""Packages of the trainer's layers."""
_ENV = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment that hides the GPUs of this host."""
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""Prefix of torch's traceback lines."""
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)


def check_build(config: Config) -> None:
    """Check that the installed packages can build the trainer's layers.

    Raises:
        UserError: they cannot.
    """
    done = subprocess.run(
        module_command("rlsys.rehearse.build"),
        input=config.model_dump_json(), capture_output=True, text=True, env={**os.environ, **_ENV}, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    if done.returncode == UserError.exit_code and lines:
        raise UserError(lines[-1])
    raise UserError(f"the trainer cannot be built here: {_error(done)}; {_versions()}")


def _error(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the build process was killed by signal {-done.returncode}"
    text = _RANK.sub("", done.stderr)
    lines, frames = text.strip().splitlines(), _FRAME.findall(text)
    location = f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if frames else ""
    return (lines[-1] if lines else f"exit code {done.returncode}") + location


def _versions() -> str:
    """Return the packages with another version than required, or else the versions of the trainer's packages."""
    unmet = mismatches()
    wrong = [str(unmet[name]) for name in PACKAGES if name in unmet]
    if wrong:
        return "; ".join(wrong) + ": run `make setup`"
    return "installed: " + ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES)
