"""Count how often a reader must change files to follow one train step, and one finished group.

    python bench/step_path.py                 # this checkout
    python bench/step_path.py --tree ../old   # another checkout of rlsys, with its own .venv

The bench runs the quickstart for one small step on the real stack. The trainer records each function of rlsys that it
enters for the first time between `take` and the push. The rollout service does so from the end of the first group's
last sample to the decision on the group. The functions in this order are a walk; loops count once.

    functions   number of functions of the walk
    files       number of files of the walk
    changes     number of changes to another file
    returns     number of changes to a file that the walk had left before
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WALKS = ("step", "group")
WATCH = """
import sys
PROCESSES = {"rlsys.train": "step", "rlsys.rollout.service": "group"}
name = next((walk for module, walk in PROCESSES.items() if module in sys.orig_argv), None)
if name:
    import json, os, threading
    walk, seen, on, main = [], set(), False, threading.get_ident()
    ROOT = os.environ["STEP_PATH_ROOT"]

    def source_file(frame):
        name = frame.f_code.co_filename
        return name[len(ROOT) + 1 :] if name.startswith(ROOT + "/rlsys/") else None

    def starts(frame, event, arg):
        function = frame.f_code.co_name
        if name == "step":
            taken = event == "return" and function == "take" and arg is not None
            return taken and source_file(frame) == "rlsys/rollout/client.py"
        return event == "call" and function == "_conclude" and source_file(frame) == "rlsys/rollout/runner.py"

    def ends(frame, event):
        end = ("call", "push") if name == "step" else ("return", "_settle")
        return (event, frame.f_code.co_name) == end and source_file(frame)

    def watch(frame, event, arg):
        global on
        if threading.get_ident() != main:
            return
        on = on or starts(frame, event, arg)
        if not on:
            return
        if ends(frame, event):
            sys.setprofile(None)
            with open(os.path.join(os.environ["STEP_PATH_OUT"], name + ".json"), "w") as out:
                json.dump(walk, out)
        elif event == "call" and frame.f_code not in seen and not frame.f_code.co_name.startswith("<"):
            if path := source_file(frame):
                seen.add(frame.f_code)
                walk.append((path, frame.f_code.co_qualname))

    sys.setprofile(watch)
"""
"""The sitecustomize.py of the processes. Python imports it before any module of rlsys, in every checkout."""


def count_returns(walk: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the figures of a walk (see the module's docstring).

    Args:
        walk: (file, function) of each function, in order.
    """
    visits = [file for file, _ in groupby(file for file, _ in walk)]
    files = len(set(visits))
    return {
        "functions": len(walk),
        "files": files,
        "changes": len(visits) - 1,
        "returns": len(visits) - files,
    }


def walks(tree: Path) -> dict[str, list[tuple[str, str]]]:
    """Run the quickstart of a checkout, and return its walks by name.

    Args:
        tree: the checkout.

    Returns:
        (file, function) of each function, in the order of their first calls.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "sitecustomize.py").write_text(WATCH)
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(work), str(tree), os.environ.get("PYTHONPATH")))),
            "STEP_PATH_ROOT": str(tree),
            "STEP_PATH_OUT": str(work),
        }
        result = subprocess.run(
            [
                str(tree / ".venv" / "bin" / "rlsys"), "train", "configs/quickstart.yaml", f"run.dir={work / 'run'}",
                "trainer.steps=1", "rollout.groups_per_step=4", "eval.prompts=8",
            ],
            cwd=tree, env=env, capture_output=True, text=True,
        )  # fmt: skip
        outputs = {name: work / f"{name}.json" for name in WALKS}
        if result.returncode or not all(output.is_file() for output in outputs.values()):
            sys.exit(
                f"{tree}: rlsys train ended with exit code {result.returncode}; expected 0 and the files "
                f"{', '.join(path.name for path in outputs.values())}\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
            )
        return {
            name: [(str(file), function) for file, function in json.loads(output.read_text())]
            for name, output in outputs.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--verbose", action="store_true", help="print the walk, one line per visit of a file")
    args = parser.parse_args()
    all_walks = walks(args.tree.resolve())
    if args.verbose:
        for name, walk in all_walks.items():
            print(f"-- {name}")
            for file, entries in groupby(walk, key=lambda entry: entry[0]):
                print(f"{file}: {', '.join(function for _, function in entries)}")
    print(json.dumps({name: count_returns(walk) for name, walk in all_walks.items()}))


if __name__ == "__main__":
    main()
