"""Starts the trainer's ranks of one node: `python -m launch.ranks --ranks N --address A -m MODULE ARGUMENT ...`.

With `--first F --world W --meet HOST:PORT` the trainer has W ranks on several nodes; this node has ranks F, F + 1,
..., and HOST is rank 0's node. On one node, the rendezvous is a file in a private folder (rlsys/core/rendezvous.py).
Each start of the role has a new folder, so no rank reads data of an earlier start.

When a rank fails, this process ends the other ranks, which wait for it in a collective: with SIGTERM, and after
ENDING_SECONDS with SIGKILL. Its exit code is that of the rank that failed first, 128 + n after signal n. It forwards
SIGTERM to all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from rlsys.core.errors import UserError
from rlsys.core.imports import module_command
from rlsys.core.interfaces import choose_interface
from rlsys.core.sockets import STORE_VARIABLE, role_folder
from rlsys.obs.role import format_error

ENDING_SECONDS = 10
"""Time for the other ranks to end after a rank has failed."""
FAILED = "launch.ranks: rank"
"""Prefix of the log line that names the first failed rank. Later errors in the log are consequences."""


class Ranks:
    """Owns the processes of the ranks of this node."""

    def __init__(self, commands: list[tuple[list[str], dict[str, str]]], first: int) -> None:
        """Start the ranks.

        Args:
            commands: command line and environment of each rank.
            first: number of the first rank.
        """
        self._first = first
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = False
        signal.signal(signal.SIGTERM, self._forward)
        for command, environment in commands:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            self._running[process.pid] = process
        self._pids = list(self._running)
        if self._ending:  # a signal arrived during the start
            self._send(signal.SIGTERM)

    def wait(self) -> int:
        """Wait until all ranks have ended; return the exit code of the first that failed, else 0."""
        failure = 0
        while self._running:
            pid, status = os.wait()
            if (process := self._running.pop(pid, None)) is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            process.returncode = code
            if code and not failure:
                failure = code if code > 0 else 128 - code
                print(
                    f"{FAILED} {self._first + self._pids.index(pid)} exited with code {failure}",
                    file=sys.stderr,
                    flush=True,
                )
                self._end_others()
        return failure

    def _end_others(self) -> None:
        """Send SIGTERM to the running ranks, and SIGKILL after ENDING_SECONDS."""
        signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        signal.alarm(ENDING_SECONDS)
        self._send(signal.SIGTERM)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._ending = True
        self._send(signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for pid in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def commands_of(args: argparse.Namespace) -> list[tuple[list[str], dict[str, str]]]:
    """Return command line and environment of each rank of this node."""
    world = args.world or args.ranks
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(args.ranks)}
    if args.meet is None:
        common[STORE_VARIABLE] = str(role_folder() / "ranks")
    else:
        host, _, port = args.meet.rpartition(":")
        common |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    # Drop the variables of a surrounding torchrun, whose store is not that of these ranks.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    command = module_command(*args.command)
    return [
        (command, {**inherited, **common, "RANK": str(args.first + i), "LOCAL_RANK": str(i)})
        for i in range(args.ranks)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a node's ranks; end them together.")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this node")
    parser.add_argument("--first", type=int, default=0, help="number of the first rank")
    parser.add_argument("--world", type=int, help="number of ranks on all nodes (default: --ranks)")
    parser.add_argument(
        "--address", required=True, help="address of this node; process groups use its network interface"
    )
    parser.add_argument("--meet", metavar="HOST:PORT", help="rendezvous: rank 0's node and a free port on it")
    parser.add_argument(
        "-m", dest="command", nargs=argparse.REMAINDER, required=True, help="module to run and its arguments"
    )
    args = parser.parse_args()
    try:
        choose_interface(args.address)
        return Ranks(commands_of(args), args.first).wait()
    except UserError as e:
        print(format_error(e), file=sys.stderr, flush=True)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
