"""Keeper of one command and all of its descendants: `python -m launch.keeper [--grace SECONDS] -- COMMAND ...`.

The command runs in its own session, so that Ctrl-C in the terminal does not reach it. The keeper ends the command
with all its descendants

- when the command exits,
- on an order,
- on SIGTERM, unless the keeper is shielded,
- when standard input reaches its end. The supervisor has the other end of that pipe, also across machines (srun, a
Ray
  actor), so its death, even by kill -9, ends every role.

The keeper exits with the command's exit code, 128 + n after signal n.

Orders are single bytes on standard input:

    E   end within the grace time
    Q   end immediately
    S   dump stacks: SIGUSR2 to the descendants that handle it

With `--shielded`, the keeper ignores signals. A scheduler sends SIGTERM to every task of a job long before it kills
them, but only the supervisor knows in which order roles may end.

The keeper ends processes in three steps. It sends SIGTERM to the command only, because servers end their own
helpers in order and treat a helper's sudden death as a crash. After the command's end, it sends SIGTERM to the
remaining descendants. `grace` seconds after the first SIGTERM, it sends SIGKILL to all that remain. SIGQUIT skips the
wait.

The keeper adopts orphans, so it also finds descendants in other sessions, which a reward may start. If the keeper is
killed, launch/guard.py ends its processes. With `--cgroup NAME`, the command gets its own control group if possible
(launch/cgroup.py). The keeper owns the folder of the role's Unix sockets (rlsys/core/sockets.py). If the command
fails, a last line reports the memory that it used (launch/memory_use.py).
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
from launch.guard import adopt_orphans, end_with, run_guarded
from launch.memory_use import MemoryUse
from rlsys.core.devices import VARIABLE, visible_devices
from rlsys.core.errors import UserError
from rlsys.core.folders import deny_writing_by_others
from rlsys.core.sockets import FOLDER_VARIABLE, make_folder, remove_folder
from rlsys.obs.role import format_error


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
        """Start the command.

        Args:
            command: command line.
            grace: seconds between SIGTERM and SIGKILL.
            guard: process id of the parent. If it ends, the keeper ends the command immediately.
            shielded: whether to ignore signals other than SIGQUIT.
            gpus: indices of the node's GPUs that the command may use, such as `0,1`; None for all.
            group: control group that the command enters; None for none.
        """
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

        # The attribute keeps the Popen alive: a Popen that is garbage-collected reaps its process, so the keeper
        # would miss the end of a command that is killed immediately.
        self._command = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_keeper,
            env=os.environ if gpus is None else os.environ | {VARIABLE: visible_gpus(gpus)},
        )  # fmt: skip

    def _listen(self) -> int:
        """Register signals and standard input with the selector, so that no signal is lost between two waits.

        Returns:
            File descriptor that is readable after a signal.
        """
        wake, write_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        ignored = [signal.SIGINT, signal.SIGCHLD]
        if self._shielded:
            ignored += [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
        else:
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_end", True))
        signal.signal(signal.SIGQUIT, lambda *_: setattr(self, "_end_now", True))
        for number in ignored:
            signal.signal(number, lambda *_: None)  # the command would inherit SIG_IGN
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        return wake

    def run(self) -> int:
        """Wait for the command's end, or for an order to end it; then end all descendants.

        Returns:
            Exit code of the command.
        """
        use = MemoryUse()
        while self._exit_code is None and not (self._end or self._end_now):
            use.sample(self._descendants())
            self._sleep(memory_use.SECONDS)
        if self._exit_code and (line := use.line()):
            print(line, file=sys.stderr, flush=True)
        deadline = time.monotonic() + self._grace
        if self._exit_code is None:
            os.kill(self._command.pid, signal.SIGTERM)
        self._wait_for_end(deadline, lambda: self._exit_code is not None)
        self._signal_descendants(signal.SIGTERM)  # descendants that the command did not end
        self._wait_for_end(deadline, lambda: not self._descendants())
        if self._group is not None:
            cgroup.kill(self._group)
        while self._descendants():  # a process may start another between listing and killing
            self._signal_descendants(signal.SIGKILL)
            self._sleep(0.05)
        return self._exit_code if self._exit_code is not None else 128 + signal.SIGKILL

    def _wait_for_end(self, deadline: float, has_ended: Callable[[], bool]) -> None:
        """Wait until `has_ended` returns True, the deadline passes, or an order ends the wait."""
        while not has_ended() and not self._end_now and (remaining := deadline - time.monotonic()) > 0:
            self._sleep(min(remaining, 0.1))

    def _sleep(self, seconds: float) -> None:
        """Wait for a signal or an order, for at most `seconds`, and handle it."""
        for key, _ in self._selector.select(seconds):
            if key.fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            else:
                self._handle_orders(os.read(key.fd, 4096))
        self._reap()

    def _handle_orders(self, orders: bytes) -> None:
        """Handle bytes from standard input; none at its end."""
        if not orders:  # the supervisor is dead, or has released this keeper
            self._end = True
            self._selector.unregister(sys.stdin.fileno())
        self._end |= b"E" in orders
        self._end_now |= b"Q" in orders
        if b"S" in orders:
            for process in self._descendants():
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    if handles_signal(process.pid, signal.SIGUSR2):
                        process.send_signal(signal.SIGUSR2)

    def _reap(self) -> None:
        """Reap the command and adopted orphans that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = reaped
                if pid == self._command.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._exit_code = code if code >= 0 else 128 - code

    def _descendants(self) -> list[psutil.Process]:
        """Return the descendants that have not ended."""
        self._reap()
        return psutil.Process().children(recursive=True)

    def _signal_descendants(self, number: signal.Signals) -> None:
        for process in self._descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def visible_gpus(gpus: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a command.

    Args:
        gpus: indices of GPUs such as `0,1`: positions in the present CUDA_VISIBLE_DEVICES if the scheduler has set
            it, otherwise GPUs of the node.

    Raises:
        UserError: CUDA_VISIBLE_DEVICES lists too few GPUs.
    """
    devices = visible_devices()
    if devices is None:
        return gpus
    indices = [int(gpu) for gpu in gpus.split(",")]
    if max(indices) >= len(devices):
        raise UserError(
            f"launch.gpus_per_node: the plan uses GPU {max(indices)} of this node, but {VARIABLE} = "
            f"{os.environ[VARIABLE]!r} lists {len(devices)}; expected at least {max(indices) + 1}"
        )
    return ",".join(devices[i] for i in indices)


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for the signal. Without one, the signal would end it."""
    with open(f"/proc/{pid}/status") as f:
        mask = next((line.split()[1] for line in f if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command; end it and its descendants together.")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--shielded", action="store_true", help="end on orders only, not on SIGTERM")
    parser.add_argument("--gpus", help="indices of the node's GPUs that the command may use, as 0,1")
    parser.add_argument(
        "--cgroup", metavar="NAME", help="control group for the command, if one can be created"
    )
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    deny_writing_by_others()
    try:
        sockets = make_folder()
    except UserError as e:
        print(format_error(e), file=sys.stderr)
        return e.exit_code
    os.environ[FOLDER_VARIABLE] = str(sockets)
    group = cgroup.create(args.cgroup) if args.cgroup else None
    try:
        code = run_guarded(lambda guard: run_keeper(args, guard, group), group)
    finally:
        remove_folder(sockets)
    if group is not None:
        cgroup.end_start(group)
    return code


def run_keeper(args: argparse.Namespace, guard: int, group: Path | None) -> int:
    """Run a keeper in this process, and return its exit code.

    Args:
        args: command line of this script.
        guard: process id of the parent.
        group: control group of the command; None for none.
    """
    try:
        keeper = Keeper(args.command, args.grace, guard, shielded=args.shielded, gpus=args.gpus, group=group)
        code = keeper.run()
        remove_folder(Path(os.environ[FOLDER_VARIABLE]))  # the guard does so, too, unless it is dead
        return code
    except OSError as e:
        print(f"rlsys: error: cannot start {args.command[0]}: {e.strerror} [exit 2]", file=sys.stderr)
        return 2
    except UserError as e:
        print(format_error(e), file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
