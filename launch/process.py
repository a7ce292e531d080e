"""Process of a role: started under a keeper, with its output in a log, from which this module reads its error."""

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
"""Number of log lines that are shown if a role died without an error message."""
LINE_WIDTH = 300
"""Maximum length of these lines."""
_ENDED_BY_OTHER_RANK = 1
"""Exit code of a rank that was ended because another rank failed. The supervisor may observe its exit first."""


@dataclass(frozen=True)
class RoleStatus:
    """State of a role's process: whether it runs, and the number of its starts."""

    up: bool
    starts: int


class RoleFailed(RunError):
    """A role failed.

    Attributes:
        log_lines: last lines of its log; empty if the role reported the error.
        self_reported: whether the message is the error that the role reported.
    """

    def __init__(self, message: str, log_lines: list[str], *, self_reported: bool = False) -> None:
        super().__init__(message)
        self.log_lines = log_lines
        self.self_reported = self_reported


class RoleProcess:
    """Owns one start of one role: the backend's handle, and the offset of this start in the log."""

    def __init__(self, backend: Backend, role: Role, env: dict[str, str], log: Path) -> None:
        """Start the role.

        Args:
            backend: starts the process.
            role: the role.
            env: environment of the process.
            log: file to which the output is appended.
        """
        self.role = role
        self.ready = False
        self.timed_out = False
        """Whether the supervisor has ended the process because it was not ready in time."""
        self.started = time.monotonic()
        self.log = log
        # Only this user may read the log, because an engine prints its arguments, which include its keys.
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600))
        self._log_start = log.stat().st_size
        self._handle = backend.start(role, env, log)

    @property
    def exit_code(self) -> int | None:
        """Exit code; 128 + n after signal n; None while the process runs."""
        return self._handle.exit_code

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    def end(self, *, immediate: bool) -> None:
        """Order the process to end, within its grace time or immediately. Return without waiting for its end."""
        self._handle.order(END_NOW if immediate else END)

    def dump_stacks(self) -> None:
        """Order the role's processes to write their stacks to logs/stacks, if they support it."""
        self._handle.order(STACKS)

    def release(self) -> None:
        """Release the backend's handle, after the process has ended."""
        self._handle.release()

    def exit_reason(self) -> str:
        """Return the reason of the end as a noun phrase, such as `exit code 3` or `killed by signal 11 (SIGSEGV)`.

        If a child process of the role was killed first, this is the child's signal.
        """
        if self.timed_out:
            return "no answer in time"
        lines = self._output()
        memory = next((text for line in reversed(lines) if (text := memory_use.parse_line(line))), "")
        killed = next((code for line in lines if (code := parse_child_exit(line)) is not None), None)
        assert self.exit_code is not None
        return describe_exit(self.exit_code if killed is None else killed, memory)

    def exit_phrase(self) -> str:
        """Return the reason of the end as a verb phrase: `exited with code 3`, `was killed by signal 9 (SIGKILL)`."""
        reason = self.exit_reason()
        if reason.startswith("killed"):
            return f"was {reason}"
        return "did not answer in time" if self.timed_out else reason.replace("exit code", "exited with code")

    def failure(self, event: str) -> RlsysError:
        """Return the error of a failed role: the error that it reported, or else an error with its last log lines.

        An error line counts only if the role exited with the line's exit code. Otherwise another program, such as a
        tool or a reward, has written the line.

        Args:
            event: what the role did, such as "did not answer".
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
        """Return the last 500 lines of this start without empty ones. Other ranks may write lines after an error."""
        with self.log.open("rb") as f:
            f.seek(self._log_start)
            tail = deque((line.decode(errors="replace").rstrip() for line in f), maxlen=500)
        return [line[:LINE_WIDTH] for line in tail if line]


def _role_lines(lines: list[str]) -> list[str]:
    """Return the lines without those of the keeper, up to the line of launch.ranks about the first failed rank."""
    lines = [line for line in lines if memory_use.parse_line(line) is None]
    end = next((i + 1 for i, line in enumerate(lines) if line.startswith(RANK_FAILED)), len(lines))
    return lines[:end]
