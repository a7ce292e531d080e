"""How a role process ends: one `rlsys: error:` line in its log, and an exit code that says who can mend it.

The line carries the exit code: of several ranks the first to end may be one that another's failure ended.
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
    """`rlsys: error: MESSAGE [exit CODE]`, on one line."""
    return f"rlsys: error: {' '.join(str(error).split())} [exit {error.exit_code}]"


def parse_error(line: str) -> tuple[str, int] | None:
    """Message and exit code of such a line; None for any other line."""
    found = _LINE.match(line.strip())
    return None if found is None else (found["message"], int(found["code"]))


_OF_CHILD = re.compile(
    r"crashed with exit code |scheduler died during initialization \(exit code: "
    r"|DataParallelController \d+ terminated with "
)
"""How SGLang begins to report how the first of its processes to fail has ended."""


def describe_exit(code: int, memory: str = "") -> str:
    """`exit code 3`, or `killed by signal 11 (SIGSEGV)`. `code`: as a shell has it, 128 + n after signal n, or as
    Python has it, -n. `memory`: what is known of the memory that the process used."""
    number = -code if code < 0 else code - 128
    if number not in {s.value for s in signal.Signals}:
        return f"exit code {code}"
    killed = f"killed by signal {number} ({signal.Signals(number).name})"
    if number != signal.SIGKILL:
        return killed
    return f"{killed}, probably out of memory{': ' + memory if memory else ''}"


def parse_child_exit(line: str) -> int | None:
    """-n if the line says that signal n killed a process of a role, in the words of what started it."""
    told = re.match(r"-\d+", line[begins.end() :]) if (begins := _OF_CHILD.search(line)) else None
    return int(told[0]) if told else None


STACKS_VARIABLE = "RLSYS_STACKS"
"""Environment: the file, without its ending, that a role's process writes its stack to on SIGUSR2."""


def show_stack_on_signal(part: str = "") -> None:
    """SIGUSR2 appends the stack to the file that the supervisor names: one for each rank, or `part` of a role that
    is several processes. Else nothing."""
    if base := os.environ.get(STACKS_VARIABLE):
        rank = os.environ.get("RANK")
        part = part or (f"rank{rank}" if rank else "")
        path = Path(base + (f"-{part}" if part else "") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Open for the life of the process: a handler must not allocate, and a hung one cannot open files.
        faulthandler.register(signal.SIGUSR2, file=path.open("w"), all_threads=False)


def unless_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those of the signals that this process was not started to ignore: `nohup COMMAND` and, in a script, `COMMAND &`
    ask for that, and a handler would take it back."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Linux: SIGKILL as soon as the process that started this one is gone, however that came.

    A keeper ends its role's tree, but a keeper can be killed: its command dies with it (launch/keeper.py), and by
    this so do the ranks that the command (launch/ranks.py) has started.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it went a moment before
            os.kill(os.getpid(), signal.SIGKILL)


def run_role(body: Callable[[], object]) -> None:
    """Run a role's main function. An RlsysError ends as that line and its code; a bug keeps its traceback."""
    end_with_parent()
    show_stack_on_signal()
    try:
        body()
    except RlsysError as e:
        print(format_error(e), file=sys.stderr, flush=True)
        sys.exit(e.exit_code)
