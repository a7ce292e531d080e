"""Run the `sh` blocks of a tutorial page, in order, as a program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.python_path import python_path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.md"))
FIRST_RUN = ROOT / "docs" / "tutorials" / "01-first-run.md"
NEEDS_STACK = re.compile(r"^rlsys (train|try|eval|sft|convert) ", re.MULTILINE)
"""Commands that start engines or load Megatron."""


def script_of(page: Path) -> str:
    return "".join(
        re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )


def reads_first_run(page: Path) -> bool:
    """Return whether a page uses the run folder of the first page."""
    return page != FIRST_RUN and "runs/quickstart" in script_of(page)


def needs_stack(page: Path) -> bool:
    return reads_first_run(page) or NEEDS_STACK.search(script_of(page)) is not None


def run_page(page: Path, folder: Path) -> str:
    """Run the commands of a page in `folder` and return their output. Fail with the output of the first error."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": python_path(ROOT), "COLUMNS": "120"}
    process = subprocess.run(
        ["bash", "-euo", "pipefail"],
        input=script_of(page),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, f"{page.name}: {process.stdout[-1500:]}\n{process.stderr[-3000:]}"
    return process.stdout
