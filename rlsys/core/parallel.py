"""Work on a range of numbers, cut into parts for processes that share this one's memory. Standard library only.

The processes are forked: what `work` reads needs no copy, and only what it returns is sent. They must not use what
threads of this process hold, as thread pools of libraries; plain Python, numpy and Arrow's arrays are safe.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from rlsys.core.errors import RlsysError

MOST_PROCESSES = 8
T = TypeVar("T")


def in_parts(total: int, work: Callable[[int, int], T], least: int) -> list[T]:
    """`work(start, stop)` of ranges that together are `range(total)`, in their order; one for each CPU, of at least
    `least` numbers. Raises the RlsysError of the first part that raised one."""
    count = max(1, min(len(os.sched_getaffinity(0)), MOST_PROCESSES, total // least))
    bounds = [total * i // count for i in range(count + 1)]
    started: list[tuple[int, int]] = []
    try:
        for start, stop in itertools.pairwise(bounds[1:]):
            started.append(_fork(work, start, stop))
        found = [work(0, bounds[1])]
        found += [_result(pipe) for _, pipe in started]
        return found
    finally:
        for process, pipe in started:
            os.close(pipe)  # a process that still writes ends with it
            os.waitpid(process, 0)


def _fork(work: Callable[[int, int], T], start: int, stop: int) -> tuple[int, int]:
    """The process, and the pipe with its result."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads, which the module's docstring excludes
        process = os.fork()
    if process == 0:
        os.close(reads)
        _run(work, start, stop, writes)
    os.close(writes)
    return process, reads


def _run(work: Callable[[int, int], T], start: int, stop: int, pipe: int) -> NoReturn:
    """Send what `work` returns or the RlsysError that it raises. Whatever else it raises is printed."""
    code = 1
    try:
        gc.disable()
        with contextlib.suppress(ValueError):  # not of the main thread
            signal.set_wakeup_fd(-1)  # else a signal to this process would wake the parent's event loop
        message: tuple[bool, object]
        try:
            message = True, work(start, stop)
        except RlsysError as e:
            message = False, e
        with open(pipe, "wb") as file, contextlib.suppress(BrokenPipeError):  # the parent has stopped to read
            pickle.dump(message, file)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _result(pipe: int) -> Any:
    with open(pipe, "rb", closefd=False) as file:
        try:
            right, found = pickle.load(file)
        except EOFError:
            raise RuntimeError("a process for a part of the rows failed") from None
    if right:
        return found
    raise found
