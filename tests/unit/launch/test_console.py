"""Messages of the supervisor on a closed terminal or a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import rich.console

from launch.console import Console
from rlsys.obs.progress import PlainProgress
from tests.helpers.supervisor_stage import Recorder

EVAL = {"kind": "eval", "step": 1, "accuracy": 0.5, "prompts": 2}


def test_the_log_has_all_lines_if_the_display_cannot_write(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    terminal = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - close fails, too
    console = Console(PlainProgress(1, rich.console.Console(file=terminal)), lambda: log)
    console.report("first")
    assert console.progress("10 %")
    console.entry(EVAL, live=True)
    console.status({})
    console.report("second")
    with suppress(OSError):
        terminal.close()
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["first", "second"]


CLOSED = """
import sys
from pathlib import Path
import rich.console
from launch.console import Console
from rlsys.obs.progress import PlainProgress

console = Console(PlainProgress(1, rich.console.Console()), lambda: Path(sys.argv[1]))
console.report("first")
console.progress("10 %")
console.report("second")
"""


def test_a_closed_pipe_does_not_end_the_process(tmp_path: Path) -> None:
    """rich raises SystemExit for it."""
    log = tmp_path / "supervisor.log"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        subprocess.run([sys.executable, "-c", CLOSED, log], stdout=writer, check=True)
    finally:
        os.close(writer)
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["first", "second"]


def test_the_log_counts_the_lines_that_it_lacks(tmp_path: Path) -> None:
    display, log = Recorder(), tmp_path / "supervisor.log"
    console = Console(display, lambda: log)
    log.mkdir()
    console.report("first")
    console.report("second")
    log.rmdir()
    console.report("third")
    assert display.phases == ["first", "second", "third"]
    missing, line = log.read_text().splitlines()
    assert missing == "(2 lines before this one could not be written)"
    assert line.endswith(" third")
