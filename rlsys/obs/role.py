"""Main function of a role's processes, and the end of a process: an `rlsys: error:` line in its log, and an exit
code.

The line contains the exit code: if a rank fails, other ranks may end first, with other exit codes.
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
    """Return the line of an error, `rlsys: error: MESSAGE [exit CODE]`."""
    return f"rlsys: error: {' '.join(str(error).split())} [exit {error.exit_code}]"


def parse_error(line: str) -> tuple[str, int] | None:
    """Return message and exit code in a line of `format_error`; None for another line."""
    match = _LINE.match(line.strip())
    return None if match is None else (match["message"], int(match["code"]))


_OF_CHILD = re.compile(
    r"crashed with exit code |scheduler died during initialization \(exit code: "
    r"|DataParallelController \d+ terminated with "
)
"""Start of SGLang's message about its first failed process."""


def describe_exit(code: int, memory: str = "") -> str:
    """Return the description of an exit code: `exit code 3`, or `killed by signal 11 (SIGSEGV)`.

    Args:
        code: exit code; for a process that signal n killed, 128 + n as in a shell, or -n as in Python.
        memory: description of the process's memory use; empty: unknown.
    """
    number = -code if code < 0 else code - 128
    if number not in {s.value for s in signal.Signals}:
        return f"exit code {code}"
    killed = f"killed by signal {number} ({signal.Signals(number).name})"
    if number != signal.SIGKILL:
        return killed
    return f"{killed}, probably out of memory{': ' + memory if memory else ''}"


def parse_child_exit(line: str) -> int | None:
    """Return -n if the line is SGLang's message that signal n killed one of its processes; None for another line."""
    start = _OF_CHILD.search(line)
    code = re.match(r"-\d+", line[start.end() :]) if start else None
    return int(code[0]) if code else None


STACKS_VARIABLE = "RLSYS_STACKS"
"""Environment variable: the file, without suffix, to which a role's process writes its stack on SIGUSR2."""


def dump_stack_on_signal(part: str = "") -> None:
    """Write the main thread's stack to the file of STACKS_VARIABLE whenever this process receives SIGUSR2.

    Args:
        part: suffix of the file; empty: the rank of this process, if it has one.
    """
    if base := os.environ.get(STACKS_VARIABLE):
        rank = os.environ.get("RANK")
        part = part or (f"rank{rank}" if rank else "")
        path = Path(base + (f"-{part}" if part else "") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file stays open, because a signal handler must not allocate memory.
        faulthandler.register(signal.SIGUSR2, file=path.open("w"), all_threads=False)


def without_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the given signals, except signals that this process ignores.

    `nohup COMMAND` and, in a script, `COMMAND &` make a process ignore signals; a handler would undo this.
    """
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Linux only.

    A keeper ends the processes of its role, but it may be killed. The kernel then kills the keeper's command
    (launch/keeper.py), and the ranks that the command has started (launch/ranks.py).
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent has just ended
            os.kill(os.getpid(), signal.SIGKILL)


def run_role(body: Callable[[], object]) -> None:
    """Run the main function of a role's process.

    If it raises an RlsysError, print the error's line and exit with its code. Other exceptions are not caught.
    """
    end_with_parent()
    dump_stack_on_signal()
    try:
        body()
    except RlsysError as e:
        print(format_error(e), file=sys.stderr, flush=True)
        sys.exit(e.exit_code)
