"""Check that the installed packages can build the trainer's layers; takes seconds, in a separate process."""

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
"""Packages that the trainer's layers use."""
_ENV = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of the build, which must not use this host's GPUs."""
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""Prefix of torch's traceback lines."""
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)


def check_build(config: Config) -> None:
    """Build the trainer's layers in a separate process.

    Raises:
        UserError: The build fails. The message states the error, and the versions of torch and megatron-core.
    """
    result = subprocess.run(
        module_command("rlsys.rehearse.build"),
        input=config.model_dump_json(), capture_output=True, text=True, env={**os.environ, **_ENV}, check=False,
    )  # fmt: skip
    if result.returncode == 0:
        return
    lines = result.stderr.strip().splitlines()
    if result.returncode == UserError.exit_code and lines:
        raise UserError(lines[-1])
    raise UserError(f"the trainer cannot be built here: {_error(result)}; {_versions()}")


def _error(result: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a failed build's traceback with the file and line of the error."""
    if result.returncode < 0:
        return f"the build process was killed by signal {-result.returncode}"
    text = _RANK.sub("", result.stderr)
    lines, frames = text.strip().splitlines(), _FRAME.findall(text)
    location = f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if frames else ""
    return (lines[-1] if lines else f"exit code {result.returncode}") + location


def _versions() -> str:
    """Describe the packages whose versions differ from the required ones; if there are none, the installed ones."""
    version_mismatches = mismatches()
    wrong = [str(version_mismatches[name]) for name in PACKAGES if name in version_mismatches]
    if wrong:
        return "; ".join(wrong) + ": run `make setup`"
    return "installed: " + ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES)
