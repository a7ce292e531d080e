"""Keeps one command and everything it starts: `python -m launch.keeper [--grace SECONDS] -- COMMAND ...`.

The command runs in a session of its own, out of reach of the terminal's Ctrl-C. It is ended, with all its
descendants, when it exits itself, on an order, on SIGTERM (unless shielded), and when standard input reaches its
end: the supervisor holds the other end of that pipe, also across machines (srun, a Ray actor), so its death, even
by kill -9, ends every role. The exit code is passed on (128 + n for signal n).

Orders are single bytes on standard input: `E` end within the grace time, `Q` end at once, `S` ask for stacks
(SIGUSR2 to those descendants that catch it). `--shielded`: a scheduler sends SIGTERM to every task of a job long
before it kills; only the supervisor knows in which order roles may end, so signals count for nothing then.

Ending: SIGTERM to the command alone, because servers end their own helpers in order and take a helper's
sudden death for a crash; when it has ended, SIGTERM to what it left behind; `grace` seconds after the first,
SIGKILL to whatever there still is. SIGQUIT skips the wait.
Descendants that left the group (a reward may start sessions of its own) are found because the keeper adopts
orphans. A keeper can be killed too: launch/guard.py then ends what it kept. `--cgroup NAME`: the command gets
a control group of its own where that can be had (launch/cgroup.py). The role's Unix sockets have a folder that lives
as long as the role (rlsys/sockets.py). A command that fails leaves a last line about the memory that it used
(launch/memory_use.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from launch import cgroup, memory_use
from launch.guard import adopt_orphans, end_with, guarded
from launch.memory_use import MemoryUse
from rlsys.devices import VARIABLE, visible_devices
from rlsys.errors import UserError
from rlsys.obs.role import format_error
from rlsys.sockets import FOLDER_VARIABLE, make_folder, remove_folder


class Keeper:
    """Owns one command and its descendants from start to end."""

    def __init__(
        self,
        command: list[str],
        grace: float,
        guard: int,
        *,
        shielded: bool = False,
        gpus: str | None = None,
        group: Path | None = None,
    ) -> None:
        """`guard`: process id of the parent, whose end ends the command at once. `group`: the control group that the
        command enters."""
        self._group = group
        self._grace = grace
        self._shielded = shielded
        self._exit_code: int | None = None
        self._end = False
        self._end_now = False
        self._selector = selectors.DefaultSelector()
        self._wake = self._listen()
        adopt_orphans()
        self._end_now = not end_with(guard, signal.SIGQUIT)
        keeper = os.getpid()

        def die_with_keeper() -> None:
            if group is not None:
                cgroup.enter(group)
            end_with(keeper, signal.SIGKILL)

        # Held as long as the keeper lives: a Popen that is dropped collects its process, and the end of one that was
        # killed at its birth would never be seen.
        self._command = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_keeper,
            env=os.environ if gpus is None else os.environ | {VARIABLE: visible(gpus)},
        )  # fmt: skip

    def _listen(self) -> int:
        """Signals and the lifeline wake one selector: no polling, no signal lost between two looks."""
        wake, written = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written)
        deaf = [signal.SIGINT, signal.SIGCHLD]
        if self._shielded:
            deaf += [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
        else:
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_end", True))
        signal.signal(signal.SIGQUIT, lambda *_: setattr(self, "_end_now", True))
        for other in deaf:
            signal.signal(other, lambda *_: None)  # not SIG_IGN: the command would inherit that
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        return wake

    def run(self) -> int:
        """Wait for the command's end or an order to end it; returns its exit code; nothing of it is left."""
        use = MemoryUse()
        while self._exit_code is None and not (self._end or self._end_now):
            use.look(self._rest())
            self._sleep(memory_use.SECONDS)
        if self._exit_code and (line := use.line()):
            print(line, file=sys.stderr, flush=True)
        deadline = time.monotonic() + self._grace
        if self._exit_code is None:
            os.kill(self._command.pid, signal.SIGTERM)
        self._wait_for_end(deadline, lambda: self._exit_code is not None)
        self._signal_rest(signal.SIGTERM)  # what the command should have ended, and did not
        self._wait_for_end(deadline, lambda: not self._rest())
        if self._group is not None:
            cgroup.kill(self._group)
        while self._rest():  # a process may start another between look and kill
            self._signal_rest(signal.SIGKILL)
            self._sleep(0.05)
        return self._exit_code if self._exit_code is not None else 128 + signal.SIGKILL

    def _wait_for_end(self, deadline: float, ended: Callable[[], bool]) -> None:
        while not ended() and not self._end_now and (left := deadline - time.monotonic()) > 0:
            self._sleep(min(left, 0.1))

    def _sleep(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            else:
                self._obey(os.read(key.fd, 4096))
        self._reap()

    def _obey(self, orders: bytes) -> None:
        if not orders:  # the supervisor is gone
            self._end = True
            self._selector.unregister(sys.stdin.fileno())
        self._end |= b"E" in orders
        self._end_now |= b"Q" in orders
        if b"S" in orders:
            for process in self._rest():
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    if catches(process.pid, signal.SIGUSR2):
                        process.send_signal(signal.SIGUSR2)

    def _reap(self) -> None:
        """Collect the command and adopted orphans that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid == self._command.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._exit_code = code if code >= 0 else 128 - code

    def _rest(self) -> list[psutil.Process]:
        self._reap()
        return psutil.Process().children(recursive=True)

    def _signal_rest(self, number: signal.Signals) -> None:
        for process in self._rest():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def visible(gpus: str) -> str:
    """CUDA_VISIBLE_DEVICES for the indices "0,1": counted among what the scheduler gave, if it gave a list. Raises
    UserError where the list ends before."""
    devices = visible_devices()
    if devices is None:
        return gpus
    if max(map(int, gpus.split(","))) >= len(devices):
        raise UserError(
            f"launch.gpus_per_node: GPU {gpus} is planned, but {VARIABLE} = {os.environ[VARIABLE]!r} shows "
            f"{len(devices)}"
        )
    return ",".join(devices[int(i)] for i in gpus.split(","))


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for the signal: others it would end."""
    with open(f"/proc/{pid}/status") as f:
        mask = next((line.split()[1] for line in f if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command; end it and its descendants together.")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--shielded", action="store_true", help="end by orders only, not by SIGTERM")
    parser.add_argument("--gpus", help="which of the node's GPUs the command sees, as 0,1")
    parser.add_argument(
        "--cgroup", metavar="NAME", help="control group for the command, where one can be had"
    )
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    try:
        sockets = make_folder()
    except UserError as e:
        print(format_error(e), file=sys.stderr)
        return e.exit_code
    os.environ[FOLDER_VARIABLE] = str(sockets)
    group = cgroup.make(args.cgroup) if args.cgroup else None
    try:
        code = guarded(lambda guard: keep(args, guard, group), group)
    finally:
        remove_folder(sockets)
    if group is not None:
        cgroup.end_start(group)
    return code


def keep(args: argparse.Namespace, guard: int, group: Path | None) -> int:
    """The keeper's process; its exit code."""
    try:
        keeper = Keeper(args.command, args.grace, guard, shielded=args.shielded, gpus=args.gpus, group=group)
        code = keeper.run()
        remove_folder(Path(os.environ[FOLDER_VARIABLE]))  # the guard does so too, if it lives
        return code
    except OSError as e:
        print(f"rlsys: error: cannot start {args.command[0]}: {e.strerror} [exit 2]", file=sys.stderr)
        return 2
    except UserError as e:
        print(format_error(e), file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
