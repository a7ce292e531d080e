"""Guard of a keeper: the process that a backend starts, with the keeper as its child. It survives a killed keeper.

    backend -- guard -- keeper -- command -- ... descendants, also in other sessions

Guard and keeper each end the process tree when the other dies. If the keeper dies, the guard adopts its descendants
(Linux: PR_SET_CHILD_SUBREAPER) and kills them. If the guard dies, the kernel sends a signal to the keeper
(PR_SET_PDEATHSIG), which ends its command immediately. Both have the run's lock until no process is left.

If the role has a control group (launch/cgroup.py), the guard kills the group first. If guard and keeper die together,
the backend kills the group.
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
    """Kill all descendants until none is left, because a process may start another between listing and killing."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_SECONDS)


def adopt_orphans() -> None:
    """Make this process, rather than init, the new parent of descendants whose parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(parent: int, number: signal.Signals) -> bool:
    """Make the kernel send signal `number` to this process when `parent` ends. Linux only.

    Returns:
        False if `parent` has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent
