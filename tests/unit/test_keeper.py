"""A keeper ends its command's whole tree, also when the keeper itself is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.supervisor_stage import wait_until

ROOT = Path(__file__).resolve().parents[2]
GRANDCHILD = """
import os, pathlib, signal, sys
os.setsid()
if os.fork():
    os._exit(0)
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(str(os.getpid()))
part.rename(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: signal.pause()
"""
COMMAND = """
import signal, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
while True: signal.pause()
"""


def started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A keeper, and a grandchild of its command: in a session of its own, without a parent, deaf to SIGTERM."""
    said = tmp_path / "grandchild"
    argv = [sys.executable, "-m", "launch.keeper", "--grace", "60", "--"]
    keeper = subprocess.Popen(
        [*argv, sys.executable, "-c", COMMAND, GRANDCHILD, str(said)], cwd=ROOT, stdin=subprocess.PIPE
    )
    wait_until(said.exists)
    return keeper, psutil.Process(int(said.read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_keeper_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """Before: a SIGKILL of the keeper left what had called setsid to init."""
    keeper, grandchild = started(tmp_path)
    with keeper:
        if number == signal.SIGTERM:
            keeper.send_signal(signal.SIGTERM)
            keeper.send_signal(signal.SIGQUIT)  # or it would wait for its grace time
        else:
            keeper.kill()
        grandchild.wait(60)


def test_nothing_outlives_a_killed_child_of_the_guard(tmp_path: Path) -> None:
    keeper, grandchild = started(tmp_path)
    with keeper:
        inner = next(p for p in psutil.Process(keeper.pid).children() if "launch.keeper" in p.cmdline())
        inner.kill()
        grandchild.wait(60)
        assert keeper.wait(60) == 128 + signal.SIGKILL


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "launch.keeper", "--", sys.executable, "-c", "import sys; sys.exit(7)"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE) as keeper:
        assert keeper.wait(60) == 7
