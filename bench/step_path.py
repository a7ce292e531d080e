"""Changes of file along one train step, counted on a real one, from `take` to the push.

    python bench/step_path.py                 # this tree
    python bench/step_path.py --tree ../old   # another tree of rlsys, with its own .venv

The quickstart runs for one small step on the real stack. Rank 0 writes down each function of rlsys when it is called
for the first time: loops count once, as a reader reads them. `changes` is how often the file changes along this walk,
`returns` how often it comes back to a file that it had left.
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
WATCH = """
import sys
if "rlsys.train" in sys.orig_argv:
    import json, os, threading
    walk, seen, on, main = [], set(), False, threading.get_ident()
    ROOT = os.environ["STEP_PATH_ROOT"]

    def source_file(frame):
        name = frame.f_code.co_filename
        return name[len(ROOT) + 1 :] if name.startswith(ROOT + "/rlsys/") else None

    def watch(frame, event, arg):
        global on
        if event == "return" and frame.f_code.co_name == "take" and arg is not None:
            on = on or source_file(frame) == "rlsys/rollout/client.py"
        if not on or event != "call" or threading.get_ident() != main or (path := source_file(frame)) is None:
            return
        if frame.f_code.co_name == "push":
            sys.setprofile(None)
            with open(os.environ["STEP_PATH_OUT"], "w") as out:
                json.dump(walk, out)
        elif frame.f_code not in seen and not frame.f_code.co_name.startswith("<"):
            seen.add(frame.f_code)
            walk.append((path, frame.f_code.co_qualname))

    sys.setprofile(watch)
"""
"""Becomes the trainer's sitecustomize.py: it is there before the first import of rlsys, in whatever tree."""


def counted(walk: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Count the functions and files of the walk, and how often the file changes and comes back."""
    visits = [file for file, _ in groupby(file for file, _ in walk)]
    files = len(set(visits))
    return {
        "functions": len(walk),
        "files": files,
        "changes": len(visits) - 1,
        "returns": len(visits) - files,
    }


def walk(tree: Path) -> list[tuple[str, str]]:
    """(file, function) of one step, in the order in which they are entered for the first time."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "sitecustomize.py").write_text(WATCH)
        output = work / "walk.json"
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(work), str(tree), os.environ.get("PYTHONPATH")))),
            "STEP_PATH_ROOT": str(tree),
            "STEP_PATH_OUT": str(output),
        }
        done = subprocess.run(
            [
                str(tree / ".venv" / "bin" / "rlsys"), "train", "configs/quickstart.yaml", f"run.dir={work / 'run'}",
                "trainer.steps=1", "rollout.groups_per_step=4", "eval.prompts=8",
            ],
            cwd=tree, env=env, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode or not output.is_file():
            sys.exit(f"the run in {tree} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return [(str(file), name) for file, name in json.loads(output.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to measure (default: this one)")
    parser.add_argument("--verbose", action="store_true", help="print the walk, one line per visit of a file")
    args = parser.parse_args()
    entered = walk(args.tree.resolve())
    if args.verbose:
        for file, entries in groupby(entered, key=lambda entry: entry[0]):
            print(f"{file}: {', '.join(name for _, name in entries)}")
    print(json.dumps(counted(entered)))


if __name__ == "__main__":
    main()
