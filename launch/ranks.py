"""Starts the trainer's ranks of one node: `python -m launch.ranks --ranks N --address A -m MODULE ARGUMENT ...`.

With `--first F --world W --meet HOST:PORT` they are ranks F, F + 1, ... of W on several nodes, and meet at rank 0's
node. Ranks of one node meet in a file of a folder that nobody else can read (rlsys/core/rendezvous.py). Each start
of the role has a new folder, so no rank reads what another start has left.

When a rank fails, the others get SIGTERM, and after some seconds SIGKILL: they wait for it in a collective. The exit
code is that of the rank that failed first, 128 + n after signal n. SIGTERM is passed on.
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
from rlsys.core.interfaces import choose_interface
from rlsys.core.sockets import STORE_VARIABLE, role_folder
from rlsys.obs.role import format_error

ENDING_SECONDS = 10
"""What the others may take after a rank has failed."""
FAILED = "launch.ranks: rank"
"""How a line in the log begins that says which rank failed first; what follows is of no use."""


class Ranks:
    """The ranks of this node, from start to end."""

    def __init__(self, commands: list[tuple[list[str], dict[str, str]]], first: int) -> None:
        """`commands`: of each rank, with its environment; `first`: number of the first one."""
        self._first = first
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._told_to_end = False
        signal.signal(signal.SIGTERM, self._pass_on)
        for command, environment in commands:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            self._running[process.pid] = process
        self._pids = list(self._running)
        if self._told_to_end:  # while they were being started
            self._send(signal.SIGTERM)

    def wait(self) -> int:
        """Wait until all have ended; the exit code of the first that failed, else 0."""
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
                self._end_rest()
        return failure

    def _end_rest(self) -> None:
        signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        signal.alarm(ENDING_SECONDS)
        self._send(signal.SIGTERM)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._told_to_end = True
        self._send(signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for pid in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def commands_of(args: argparse.Namespace) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of each rank of this node."""
    world = args.world or args.ranks
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(args.ranks)}
    if args.meet is None:
        common[STORE_VARIABLE] = str(role_folder() / "ranks")
    else:
        host, _, port = args.meet.rpartition(":")
        common |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    # Of a torchrun that this runs under: its store is not the store of these ranks.
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    command = [sys.executable, "-m", *args.command]
    return [
        (command, {**own, **common, "RANK": str(args.first + i), "LOCAL_RANK": str(i)})
        for i in range(args.ranks)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a node's ranks; end them together.")
    parser.add_argument("--ranks", type=int, required=True, help="how many on this node")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--world", type=int, help="ranks of all nodes; this node's when not given")
    parser.add_argument("--address", required=True, help="of this node; process groups use its interface")
    parser.add_argument("--meet", metavar="HOST:PORT", help="rank 0's node, and a free port of it")
    parser.add_argument(
        "-m", dest="command", nargs=argparse.REMAINDER, required=True, help="module and arguments"
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
