"""One role as a process: started under a keeper, its output in its log, its death explained from there."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from launch import memory_use
from launch.backends import END, END_NOW, STACKS, Backend
from launch.plan import Role
from launch.ranks import FAILED as RANK_FAILED
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.obs.role import describe_exit, parse_child_exit, parse_error

LAST_LINES = 15
_OF_ANOTHER_RANK = 1
"""Exit code of a rank that another one's failure ended, and that may have been noticed first."""
LINE_WIDTH = 300
"""How much of a log is shown when a role died without saying why."""


@dataclass(frozen=True)
class RoleTold:
    """What of a role's process others may know."""

    up: bool
    starts: int


class RoleFailed(RunError):
    """A role ended. `log_lines` are its last ones, empty when its message is the role's own words."""

    def __init__(self, message: str, log_lines: list[str], *, own_words: bool = False) -> None:
        super().__init__(message)
        self.log_lines = log_lines
        self.own_words = own_words


class RoleProcess:
    """Owns one start of one role: its handle at the backend, and where in the log this start begins."""

    def __init__(self, backend: Backend, role: Role, env: dict[str, str], log: Path) -> None:
        self.role = role
        self.ready = False
        self.late = False
        """It did not answer in time and was told to end."""
        self.started = time.monotonic()
        self.log = log
        # An engine tells its arguments there, of which its keys are two.
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600))
        self._log_start = log.stat().st_size
        self._handle = backend.start(role, env, log)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n after signal n."""
        return self._handle.exit_code

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def end(self, *, now: bool) -> None:
        """Ask it to end within its grace time, or at once. Returns before it has."""
        self._handle.order(END_NOW if now else END)

    def ask_for_stacks(self) -> None:
        """Those of its processes that know how write their stacks to logs/stacks."""
        self._handle.order(STACKS)

    def release(self) -> None:
        """After its end: let go of what led to it."""
        self._handle.release()

    def ending(self) -> str:
        """How it ended, as a noun: its exit code, or the signal that killed it or the first of its own processes."""
        if self.late:
            return "no answer in time"
        lines = self._output()
        memory = next((told for line in reversed(lines) if (told := memory_use.parse_line(line))), "")
        killed = next((code for line in lines if (code := parse_child_exit(line)) is not None), None)
        assert self.exit_code is not None
        return describe_exit(self.exit_code if killed is None else killed, memory)

    def ended(self) -> str:
        """The same as a verb: `exited with code 3`, `was killed by signal 11 (SIGSEGV)`."""
        ending = self.ending()
        if ending.startswith("killed"):
            return f"was {ending}"
        return "did not answer in time" if self.late else ending.replace("exit code", "exited with code")

    def failure(self, what: str) -> RlsysError:
        """The error of a role that `what` ("did not answer", ...): its own words where it ended with some.

        Such a line of one that was killed, or that still runs, is somebody else's: a tool's or a reward's output.
        """
        lines = _without_machinery(self._output())
        for line in reversed(lines):
            if found := parse_error(line):
                message, code = found
                if self.exit_code not in (code, _OF_ANOTHER_RANK):
                    break
                if code == UserError.exit_code:
                    return UserError(message)
                return RoleFailed(message, [], own_words=True)
        return RoleFailed(f"{self.role.name} {what}; its log: {self.log}", lines[-LAST_LINES:])

    def _output(self) -> list[str]:
        """The last lines that this start wrote: far back, because a rank's error line may stand early."""
        with self.log.open("rb") as f:
            f.seek(self._log_start)
            tail = deque((line.decode(errors="replace").rstrip() for line in f), maxlen=500)
        return [line[:LINE_WIDTH] for line in tail if line]


def _without_machinery(lines: list[str]) -> list[str]:
    """What a role itself wrote, up to the line that says which rank failed first: others write of its death."""
    lines = [line for line in lines if memory_use.parse_line(line) is None]
    end = next((i + 1 for i, line in enumerate(lines) if line.startswith(RANK_FAILED)), len(lines))
    return lines[:end]
