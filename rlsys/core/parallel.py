"""Parallel map over a range of numbers in forked processes. Standard library only.

Forked processes share the memory of this process, so the data that `work` reads is not copied; only its results are
sent. `work` must not use thread pools of libraries. Plain Python, numpy and Arrow arrays are safe.
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
    """Split `range(total)` into contiguous parts, and call `work` for each part in a process.

    There is one part per CPU, but at most MAX_PROCESSES, and fewer if parts would be smaller than `min_size`.

    Args:
        total: end of the range.
        work: called with start and stop of a part.
        min_size: minimum size of a part.

    Returns:
        the results, in the order of the parts.

    Raises:
        RlsysError: `work` raised it; if several calls did, the error of the first part.
        RuntimeError: a process ended without a result.
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
            os.close(pipe)  # ends a process that still writes
            os.waitpid(process, 0)


def _fork(work: Callable[[int, int], T], start: int, stop: int) -> tuple[int, int]:
    """Fork a process that calls `work`. Return its id, and the read end of the pipe for its result."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warns if this process has threads
        process = os.fork()
    if process == 0:
        os.close(read_end)
        _run(work, start, stop, write_end)
    os.close(write_end)
    return process, read_end


def _run(work: Callable[[int, int], T], start: int, stop: int, pipe: int) -> NoReturn:
    """Write the result of `work` to the pipe, or the RlsysError that it raises, and exit.

    The traceback of another exception goes to stderr.
    """
    code = 1
    try:
        gc.disable()
        with contextlib.suppress(ValueError):  # raised outside the main thread
            signal.set_wakeup_fd(-1)  # otherwise a signal to this process would wake the parent's event loop
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
