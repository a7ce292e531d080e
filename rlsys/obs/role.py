"""End of a role process: one `rlsys: error:` line in its log, and an exit code.

The line contains the exit code, because among several ranks the first to end may have been ended by another's
failure.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rlsys.core.errors import RlsysError

_LINE = re.compile(r"^rlsys: error: (?P<message>.*?) \[exit (?P<code>\d+)\]$")


def format_error(error: RlsysError) -> str:
    """Format an error as one line, `rlsys: error: MESSAGE [exit CODE]`."""
    return f"rlsys: error: {' '.join(str(error).split())} [exit {error.exit_code}]"


def parse_error(line: str) -> tuple[str, int] | None:
    """Return message and exit code of such a line; None for any other line."""
    match = _LINE.match(line.strip())
    return None if match is None else (match["message"], int(match["code"]))


_OF_CHILD = re.compile(
    r"crashed with exit code |scheduler died during initialization \(exit code: "
    r"|DataParallelController \d+ terminated with "
)
"""Start of SGLang's message about its first failed process."""


def describe_exit(code: int, memory: str = "") -> str:
    """Describe an exit code: `exit code 3`, or `killed by signal 11 (SIGSEGV)`.

    Args:
        code: 128 + n after signal n, as in a shell, or -n, as in Python.
        memory: description of the process's memory use, if known.
    """
    number = -code if code < 0 else code - 128
    if number not in {s.value for s in signal.Signals}:
        return f"exit code {code}"
    killed = f"killed by signal {number} ({signal.Signals(number).name})"
    if number != signal.SIGKILL:
        return killed
    return f"{killed}, probably out of memory{': ' + memory if memory else ''}"


def parse_child_exit(line: str) -> int | None:
    """Return -n if the line reports that signal n killed a process of a role."""
    match = re.match(r"-\d+", line[begins.end() :]) if (begins := _OF_CHILD.search(line)) else None
    return int(match[0]) if match else None


STACKS_VARIABLE = "RLSYS_STACKS"
"""Environment variable: the file, without suffix, to which a role's process writes its stack on SIGUSR2."""


def dump_stack_on_signal(part: str = "") -> None:
    """Append the stack to the supervisor's file on SIGUSR2: one file per rank, or per `part` of a role."""
    if base := os.environ.get(STACKS_VARIABLE):
        rank = os.environ.get("RANK")
        part = part or (f"rank{rank}" if rank else "")
        path = Path(base + (f"-{part}" if part else "") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Kept open: a signal handler must not allocate, and a hung process cannot open files.
        faulthandler.register(signal.SIGUSR2, file=path.open("w"), all_threads=False)


def without_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process did not inherit as ignored.

    `nohup COMMAND` and, in a script, `COMMAND &` ignore signals; a handler would undo that.
    """
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have SIGKILL sent to this process when its parent ends. Linux only.

    A keeper ends its role's processes, but can be killed itself: its command then dies with it
    (launch/keeper.py), and with the command the ranks that it has started (launch/ranks.py).
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent has just ended
            os.kill(os.getpid(), signal.SIGKILL)


def run_role(body: Callable[[], object]) -> None:
    """Run a role's main function.

    An RlsysError ends the process with its line and exit code; a bug keeps its traceback.
    """
    end_with_parent()
    dump_stack_on_signal()
    try:
        body()
    except RlsysError as e:
        print(format_error(e), file=sys.stderr, flush=True)
        sys.exit(e.exit_code)
