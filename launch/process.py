"""A role as a process: started under a keeper, with its output in a log that explains its death."""

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
_ENDED_BY_OTHER_RANK = 1
"""Exit code of a rank that was ended because another rank failed; its exit may be observed first."""
LINE_WIDTH = 300
"""Maximum length of the log lines that are shown when a role died without an error message."""


@dataclass(frozen=True)
class RoleStatus:
    """Public state of a role's process."""

    up: bool
    starts: int


class RoleFailed(RunError):
    """A role failed. `log_lines` are its last ones; empty if the role reported the error itself."""

    def __init__(self, message: str, log_lines: list[str], *, self_reported: bool = False) -> None:
        super().__init__(message)
        self.log_lines = log_lines
        self.self_reported = self_reported


class RoleProcess:
    """Owns one start of one role: the backend's handle, and the offset of this start in the log."""

    def __init__(self, backend: Backend, role: Role, env: dict[str, str], log: Path) -> None:
        self.role = role
        self.ready = False
        self.timed_out = False
        """Whether it did not answer in time and was ordered to end."""
        self.started = time.monotonic()
        self.log = log
        # An engine prints its arguments there, including its keys.
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600))
        self._log_start = log.stat().st_size
        self._handle = backend.start(role, env, log)

    @property
    def exit_code(self) -> int | None:
        """Exit code; 128 + n after signal n; None while it runs."""
        return self._handle.exit_code

    @property
    def seconds(self) -> float:
        """Time since its start."""
        return time.monotonic() - self.started

    def end(self, *, immediate: bool) -> None:
        """Order it to end within its grace time, or immediately. Does not wait."""
        self._handle.order(END_NOW if immediate else END)

    def dump_stacks(self) -> None:
        """Make its processes write their stacks to logs/stacks, if they can."""
        self._handle.order(STACKS)

    def release(self) -> None:
        """Release the backend's handle, after the process has ended."""
        self._handle.release()

    def exit_reason(self) -> str:
        """Describe its end as a noun: the exit code, or the signal that killed it or the first of its processes."""
        if self.timed_out:
            return "no answer in time"
        lines = self._output()
        memory = next((text for line in reversed(lines) if (text := memory_use.parse_line(line))), "")
        killed = next((code for line in lines if (code := parse_child_exit(line)) is not None), None)
        assert self.exit_code is not None
        return describe_exit(self.exit_code if killed is None else killed, memory)

    def exit_phrase(self) -> str:
        """Describe its end as a verb: `exited with code 3`, `was killed by signal 11 (SIGSEGV)`."""
        reason = self.exit_reason()
        if reason.startswith("killed"):
            return f"was {reason}"
        return "did not answer in time" if self.timed_out else reason.replace("exit code", "exited with code")

    def failure(self, event: str) -> RlsysError:
        """Return the error of a role that failed (`event`: "did not answer", ...): the one that it reported, if any.

        An error line of a role that was killed, or that still runs, comes from another program, such as a
        tool or a reward.
        """
        lines = _role_lines(self._output())
        for line in reversed(lines):
            if parsed := parse_error(line):
                message, code = parsed
                if self.exit_code not in (code, _ENDED_BY_OTHER_RANK):
                    break
                error = (
                    UserError(message)
                    if code == UserError.exit_code
                    else RoleFailed(message, [], self_reported=True)
                )
                error.origin = f"{self.role.name}; its log: {self.log}"
                return error
        return RoleFailed(f"{self.role.name} {event}; its log: {self.log}", lines[-LAST_LINES:])

    def _output(self) -> list[str]:
        """Return the last lines of this start. Many, because a rank's error line may be followed by others."""
        with self.log.open("rb") as f:
            f.seek(self._log_start)
            tail = deque((line.decode(errors="replace").rstrip() for line in f), maxlen=500)
        return [line[:LINE_WIDTH] for line in tail if line]


def _role_lines(lines: list[str]) -> list[str]:
    """Return the lines that the role wrote, up to the one that names the first failed rank."""
    lines = [line for line in lines if memory_use.parse_line(line) is None]
    end = next((i + 1 for i, line in enumerate(lines) if line.startswith(RANK_FAILED)), len(lines))
    return lines[:end]
