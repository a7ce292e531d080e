"""Set-up and two steps of the quickstart on a further Python, in a folder of its own; part of `.ci/run`.

    python -m tests.gate.other_python set-up FOLDER        mostly a download
    python -m tests.gate.other_python train FOLDER         afterwards

The commit's hash chooses one of the Pythons of launch/bootstrap.py that is not the running one: commits take turns.
Exit code 1: set-up or the quickstart failed. A Python that is not installed is reported.
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
"""Limits. A download that takes longer is no failure of ours, and is reported; a quickstart that takes longer is."""
TRAIN = (".venv/bin/rlsys", "train", "configs/quickstart.yaml", "trainer.steps=2", "run.dir=runs/quickstart")
_KEPT = 15
"""Lines that are shown of a failure."""


def order(commit: str, running: tuple[int, int]) -> list[tuple[int, int]]:
    """The other Pythons, the one whose turn it is first. `commit`: its hash."""
    versions = [version for version in bootstrap.PYTHONS if version != running]
    turn = int(commit, 16) % len(versions)
    return versions[turn:] + versions[:turn]


def find(version: tuple[int, int]) -> str | None:
    """The path of a Python on PATH or among pyenv's; None where there is none."""
    name = "python{}.{}".format(*version)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(name), *map(str, root.glob("versions/{}.{}.*/bin/{}".format(*version, name)))]
    return next((real for c in candidates if c and (real := bootstrap.real_python(c))), None)


def within(seconds: float, command: Sequence[str], folder: Path) -> str:
    """What went wrong, with the last lines of the output; empty when nothing did. Raises TimeoutExpired."""
    # A make that this process may run under passes its options and variables on, PYTHON among them.
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
        return f"exit code {code}\n" + "".join(out.readlines()[-_KEPT:]) if code else ""


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
            wrong = within(SETUP_SECONDS, ("make", "setup", f"PYTHON={python}"), folder / "clone")
        except subprocess.TimeoutExpired:
            print(f"{name}: NOT TRIED: its packages were not here after {SETUP_SECONDS} s", flush=True)
            return 0
        verdict = f"set-up FAILED: {wrong}" if wrong else "set-up passed"
        print(f"{name} ({python}): {verdict} in {time.monotonic() - start:.0f} s", flush=True)
        return 1 if wrong else 0
    print("NO FURTHER PYTHON was tried: none is installed", flush=True)
    return 0


def train(folder: Path) -> int:
    """After `set_up`, which has said why where there is nothing to train with."""
    clone = folder / "clone"
    if not (clone / ".venv" / bootstrap.STAMP.name).is_file():
        return 0
    start = time.monotonic()
    try:
        wrong = within(TRAIN_SECONDS, TRAIN, clone)
    except subprocess.TimeoutExpired:
        wrong = f"not done after {TRAIN_SECONDS} s"
    verdict = f"FAILED: {wrong}" if wrong else "passed"
    print(f"two steps of the quickstart {verdict} in {time.monotonic() - start:.0f} s", flush=True)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Try a further Python.")
    parser.add_argument("stage", choices=("set-up", "train"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started, too
    return (set_up if args.stage == "set-up" else train)(args.folder)


if __name__ == "__main__":
    sys.exit(main())
