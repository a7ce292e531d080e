"""Guard of a keeper: the process that a backend starts, with the keeper as its child. It survives a killed keeper.

    backend -- guard -- keeper -- command -- ... its descendants, also in sessions of their own

Each of the two ends the process tree when the other dies. A keeper that dies leaves its descendants to the
guard, which adopts (Linux: PR_SET_CHILD_SUBREAPER) and kills them. The death of the guard is signalled to the
keeper (PR_SET_PDEATHSIG), which ends its command at once. Both hold the run's lock until no process is left.
If the role has a control group (launch/cgroup.py), it is killed first; if guard and keeper died together, by
the backend.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from launch import cgroup

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGTERM, signal.SIGQUIT)
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.02


def run_guarded(keep: Callable[[int], int], group: Path | None) -> int:
    """Run `keep` in a child process, and return its exit code, or 128 + n if signal n killed it.

    When it returns, no descendant of the child and no process of the control group remains.

    Args:
        keep: main function of the keeper; gets the guard's process id, for `end_with`.
        group: control group of the role, or None.
    """
    adopt_orphans()
    guard = os.getpid()
    keeper = os.fork()
    if not keeper:
        os._exit(_run_child(keep, guard))
    for number in _FORWARDED:
        signal.signal(number, lambda n, _: _forward(keeper, n))
    for number in _IGNORED:
        signal.signal(number, lambda *_: None)
    _, status = os.waitpid(keeper, 0)
    if group is not None:
        cgroup.kill(group)
    _kill_all()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run_child(keep: Callable[[int], int], guard: int) -> int:
    """Run `keep`, flush the output, which `os._exit` does not, and return the exit code."""
    try:
        return keep(guard)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _forward(keeper: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, number)


def _kill_all() -> None:
    """Kill all descendants, repeatedly, since a process may start another between listing and killing."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_SECONDS)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, rather than of init. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(parent: int, number: signal.Signals) -> bool:
    """Have the signal sent to this process when `parent` ends; return False if it has already ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent
