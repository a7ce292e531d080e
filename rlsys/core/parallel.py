"""Parallel map over a range of numbers, in forked processes that share this one's memory. Standard library only.

Since the processes are forked, the data that `work` reads is not copied; only its results are sent. `work`
must not use thread pools of libraries; plain Python, numpy and Arrow arrays are safe.
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

MAX_PROCESSES = 8
T = TypeVar("T")


def map_ranges(total: int, work: Callable[[int, int], T], min_size: int) -> list[T]:
    """Split `range(total)` into one contiguous part per CPU, and return `work(start, stop)` of each, in order.

    Args:
        total: end of the range.
        work: function of `start` and `stop`.
        min_size: minimum size of a part.

    Raises:
        RlsysError: the first error, in the order of the parts, that `work` raised.
    """
    count = max(1, min(len(os.sched_getaffinity(0)), MAX_PROCESSES, total // min_size))
    bounds = [total * i // count for i in range(count + 1)]
    processes: list[tuple[int, int]] = []
    try:
        for start, stop in itertools.pairwise(bounds[1:]):
            processes.append(_fork(work, start, stop))
        results = [work(0, bounds[1])]
        results += [_result(pipe) for _, pipe in processes]
        return results
    finally:
        for process, pipe in processes:
            os.close(pipe)  # a process that still writes ends with BrokenPipeError
            os.waitpid(process, 0)


def _fork(work: Callable[[int, int], T], start: int, stop: int) -> tuple[int, int]:
    """Fork a process; return its id and the read end of the pipe for its result."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: see the module's docstring
        process = os.fork()
    if process == 0:
        os.close(read_end)
        _run(work, start, stop, write_end)
    os.close(write_end)
    return process, read_end


def _run(work: Callable[[int, int], T], start: int, stop: int, pipe: int) -> NoReturn:
    """Send the result of `work`, or the RlsysError that it raises; print any other exception."""
    code = 1
    try:
        gc.disable()
        with contextlib.suppress(ValueError):  # raised outside the main thread
            signal.set_wakeup_fd(-1)  # else a signal to this process would wake the parent's event loop
        message: tuple[bool, object]
        try:
            message = True, work(start, stop)
        except RlsysError as e:
            message = False, e
        with open(pipe, "wb") as file, contextlib.suppress(BrokenPipeError):  # the parent has stopped reading
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
            succeeded, value = pickle.load(file)
        except EOFError:
            raise RuntimeError(
                "a forked process of map_ranges exited without a result; its traceback is on stderr"
            ) from None
    if succeeded:
        return value
    raise value
