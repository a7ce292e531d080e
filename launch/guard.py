"""Outlives a keeper that is killed: the process that a backend starts is this one, and the keeper is its child.

    backend -- guard -- keeper -- command -- ... whatever it started, also in sessions of its own

Each of the two ends the tree when the other goes. A keeper that dies leaves its descendants to the guard, which
adopts them (Linux: PR_SET_CHILD_SUBREAPER) and kills them. A guard that dies is noticed by the keeper, which ends its
command at once (PR_SET_PDEATHSIG). Both hold the run's lock until nothing is left. Where the role has a control group
(launch/cgroup.py), that is killed first: also when guard and keeper died together, by the backend.
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
_DEAF = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS = 0.02


def guarded(keep: Callable[[int], int], group: Path | None) -> int:
    """Run `keep` in a child of this process; its exit code, or 128 + n when signal n killed it. Nothing is left of it
    then, nor in the control group `group`. `keep` is given the process id of the guard, for `end_with`.
    """
    adopt_orphans()
    guard = os.getpid()
    keeper = os.fork()
    if not keeper:
        os._exit(_exit_code(keep, guard))
    for number in _FORWARDED:
        signal.signal(number, lambda n, _: _forward(keeper, n))
    for number in _DEAF:
        signal.signal(number, lambda *_: None)
    _, status = os.waitpid(keeper, 0)
    if group is not None:
        cgroup.kill(group)
    _kill_all()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _exit_code(keep: Callable[[int], int], guard: int) -> int:
    """Of the child, which must not return into the parent's code."""
    try:
        return keep(guard)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _forward(keeper: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, number)


def _kill_all() -> None:
    """A process may start another between look and kill: until none is seen."""
    while rest := psutil.Process().children(recursive=True):
        for process in rest:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_LOOK_SECONDS)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, and not of init. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(parent: int, number: signal.Signals) -> bool:
    """Have the signal sent to this process when `parent` ends; False when it has ended already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent
