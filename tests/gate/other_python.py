"""Set-up and two steps of the quickstart on another Python version, in a separate folder; part of `.ci/run`.

    python -m tests.gate.other_python set-up FOLDER        mostly a download
    python -m tests.gate.other_python train FOLDER         afterwards

The commit's hash chooses one of the other Python versions of launch/bootstrap.py, so that commits alternate. The exit
code is 1 if the set-up or the quickstart failed. A version that is not installed is reported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from launch import bootstrap

SETUP_SECONDS, TRAIN_SECONDS = 20 * 60, 10 * 60
"""Time limits. A set-up beyond the limit is reported but is no failure, because it downloads packages; a quickstart
beyond the limit is a failure."""
TRAIN = (".venv/bin/rlsys", "train", "configs/quickstart.yaml", "trainer.steps=2", "run.dir=runs/quickstart")
_TAIL_LINES = 15
"""Number of last output lines to print after a failure."""


def order(commit: str, running: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the other Python versions, first the one that the hash of the commit chooses."""
    versions = [version for version in bootstrap.PYTHONS if version != running]
    turn = int(commit, 16) % len(versions)
    return versions[turn:] + versions[:turn]


def find(version: tuple[int, int]) -> str | None:
    """Return the path of a Python version on PATH or of pyenv, or None."""
    name = "python{}.{}".format(*version)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(name), *map(str, root.glob("versions/{}.{}.*/bin/{}".format(*version, name)))]
    return next((real for c in candidates if c and (real := bootstrap.real_python(c))), None)


def run_within(seconds: float, command: Sequence[str], folder: Path) -> str:
    """Run a command with a time limit.

    Returns:
        The exit code and the last lines of the output if the command failed, else "".

    Raises:
        TimeoutExpired: The command exceeded the limit.
    """
    # A parent make would pass its options and variables, such as PYTHON, to the child.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        return f"exit code {code}\n" + "".join(out.readlines()[-_TAIL_LINES:]) if code else ""


def set_up(folder: Path) -> int:
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(
        git, cwd=bootstrap.ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    for version in order(commit, sys.version_info[:2]):
        name = "Python {}.{}".format(*version)
        if (python := find(version)) is None:
            print(f"{name}: NOT INSTALLED here, so it was not tried", flush=True)
            continue
        clone = ["git", "clone", "--quiet", str(bootstrap.ROOT), str(folder / "clone")]
        subprocess.run(clone, check=True)
        start = time.monotonic()
        try:
            failure = run_within(SETUP_SECONDS, ("make", "setup", f"PYTHON={python}"), folder / "clone")
        except subprocess.TimeoutExpired:
            print(f"{name}: NOT TRIED: its packages were not here after {SETUP_SECONDS} s", flush=True)
            return 0
        verdict = f"set-up FAILED: {failure}" if failure else "set-up passed"
        print(f"{name} ({python}): {verdict} in {time.monotonic() - start:.0f} s", flush=True)
        return 1 if failure else 0
    print("NO FURTHER PYTHON was tried: none is installed", flush=True)
    return 0


def train(folder: Path) -> int:
    """Train two steps if `set_up` completed."""
    clone = folder / "clone"
    if not (clone / ".venv" / bootstrap.STAMP.name).is_file():
        return 0
    start = time.monotonic()
    try:
        failure = run_within(TRAIN_SECONDS, TRAIN, clone)
    except subprocess.TimeoutExpired:
        failure = f"not done after {TRAIN_SECONDS} s"
    verdict = f"FAILED: {failure}" if failure else "passed"
    print(f"two steps of the quickstart {verdict} in {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failure else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Try a further Python.")
    parser.add_argument("stage", choices=("set-up", "train"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # lets run_within kill the command
    return (set_up if args.stage == "set-up" else train)(args.folder)


if __name__ == "__main__":
    sys.exit(main())
