"""One role as a process: started under a keeper, its output in its log, its death explained from there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from launch.plan import Role
from rlsys.errors import RlsysError, RunError, UserError
from rlsys.obs.role import parse_error

LAST_LINES = 15
LINE_WIDTH = 300
"""How much of a log is shown when a role died without saying why."""


class RoleFailed(RunError):
    """A role ended. `log_lines` are its last ones, empty when its message already says why."""

    def __init__(self, message: str, log_lines: list[str]) -> None:
        super().__init__(message)
        self.log_lines = log_lines


class RoleProcess:
    """Owns one start of one role: keeper, lifeline, and where in the log this start begins."""

    def __init__(self, role: Role, env: dict[str, str], log: Path, *, grace: float, lock_fd: int) -> None:
        self.role = role
        self.ready = False
        self.started = time.monotonic()
        self.log = log
        with log.open("ab") as out:
            self._log_start = out.tell()
            # The pipe is the lifeline: when this process ends, however, the keeper reads its end.
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "launch.keeper", "--grace", str(grace), "--", *role.argv],
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=env,
                start_new_session=True, pass_fds=(lock_fd,),
            )  # fmt: skip

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n after signal n."""
        return self._keeper.poll()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def end(self, *, now: bool) -> None:
        """Ask it to end within its grace time, or at once. Returns before it has."""
        if self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGQUIT if now else signal.SIGTERM)

    def release(self) -> None:
        """After its end: close the lifeline."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()

    def failure(self, what: str) -> RlsysError:
        """The error of a role that `what` ("exited with code 1", ...): its own words where it left some."""
        lines = self._output()
        for line in reversed(lines):
            if found := parse_error(line):
                message, code = found
                code = self.exit_code if code is None else code
                return UserError(message) if code == UserError.exit_code else RoleFailed(message, [])
        return RoleFailed(f"{self.role.name} {what}; its log: {self.log}", lines[-LAST_LINES:])

    def _output(self) -> list[str]:
        """The last lines that this start wrote: far back, because a rank's error line may stand early."""
        with self.log.open("rb") as f:
            f.seek(self._log_start)
            tail = deque((line.decode(errors="replace").rstrip() for line in f), maxlen=500)
        lines = [line[:LINE_WIDTH] for line in tail if line]
        return lines[: _torchrun_report(lines)]


def _torchrun_report(lines: list[str]) -> int:
    """Where torchrun begins to tell of a rank's death, past its one useful line; else the end of the lines."""
    signs = ("elastic/multiprocessing/api.py", "failed (exitcode")
    return next((i + 1 for i, line in enumerate(lines) if all(s in line for s in signs)), len(lines))
