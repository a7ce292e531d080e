"""The tutorials as programs: the `sh` blocks of a page, in their order."""

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
    """It goes on in the folder that the first page leaves."""
    return page != FIRST_RUN and "runs/quickstart" in script_of(page)


def needs_stack(page: Path) -> bool:
    return reads_first_run(page) or NEEDS_STACK.search(script_of(page)) is not None


def run_page(page: Path, folder: Path) -> str:
    """What its commands print, in `folder`. AssertionError with the last words of the first that fails."""
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
