"""Table of the listening sockets of a run: their processes, permitted addresses and authentication.

docs/cluster.md has the same table.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.helpers.listeners import Listener, listeners
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS

LOOK_SECONDS = 0.2

LOOPBACK = re.compile(r"(::ffff:)?127\.\d+\.\d+\.\d+|::1")


@dataclass(frozen=True)
class Entry:
    """An entry of the table.

    Attributes:
        kind: "tcp" or "unix".
        command: Pattern of the process's command line.
        guard: Authentication of clients.
        anywhere: The listener belongs to the scheduler, which offers no choice of the address.
    """

    kind: str
    command: str
    guard: str
    anywhere: bool = False


ENGINE, RANK = r"rlsys\.engine\.server|^sglang", r"-m rlsys\.(train|trainer\.sft\.sft|tenants\.serve) "
TABLE = (
    Entry("tcp", ENGINE, "HTTP: the engine's keys; gloo and NCCL: nothing, peers of the process group only"),
    Entry("unix", ENGINE, "a folder of the run's user alone"),
    Entry("unix", r"-m rlsys\.rollout\.service ", "a folder of the run's user alone, and the run's key"),
    Entry("tcp", RANK, "gloo and NCCL: nothing, peers of the process group only"),
    Entry("unix", r"torch_shm_manager", "a folder of the run's user alone"),
    Entry("tcp", r"torch_shm_manager", "a rank's process group, whose descriptor it has inherited"),
)


SLURM = (Entry("tcp", r"^srun ", "Slurm's own: munge, and the credential of the step", anywhere=True),)
"""Entries before those of TABLE, because the command line of srun contains that of the role."""
RAY = (
    Entry(
        "tcp", r"ray::|/ray/|launch\.backend=ray", "Ray's own processes: the token that this launch has made"
    ),
    Entry("unix", r"ray::|/ray/", "a folder of the run's user alone"),
)
"""Further entries of a run whose backend starts a Ray cluster."""


def entry_of(listener: Listener, table: Iterable[Entry] = TABLE) -> Entry | None:
    return next(
        (e for e in table if e.kind == listener.kind and re.search(e.command, listener.command)), None
    )


def violations(
    found: Iterable[Listener], addresses: Iterable[str] = (), table: Iterable[Entry] = TABLE
) -> list[str]:
    """Return one message per violation. `addresses`: addresses in the config, permitted in addition to loopback."""
    wrong = []
    for one in sorted(found, key=lambda one: (one.command, one.address)):
        entry = entry_of(one, table)
        words = f"{one.kind} {one.address} of {one.command[:120]}"
        if one.kind == "unix":
            if one.reached_by:
                wrong.append(f"{words}: {one.reached_by}")
        elif not (LOOPBACK.fullmatch(one.host) or one.host in addresses or (entry and entry.anywhere)):
            wrong.append(f"{words}: neither loopback nor an address of the config")
        if entry is None:
            wrong.append(f"{words}: not in the table of sockets")
    return wrong


class Watch:
    """Collector of listeners."""

    def __init__(self) -> None:
        self.seen: set[Listener] = set()

    @contextmanager
    def over(self, roots: Callable[[], Iterable[int]]) -> Iterator[None]:
        """Collect listeners of the process trees of `roots` until the block ends."""
        stop_event = threading.Event()

        def look() -> None:
            while not stop_event.wait(LOOK_SECONDS):
                for root in roots():
                    self.seen |= listeners(root)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join()


def run_and_watch(
    *words: str, before: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> tuple[set[Listener], str]:
    """Run `rlsys WORDS` and return its listeners and its output. `before`: command words before `rlsys`."""
    watch = Watch()
    process = subprocess.Popen(
        [*before, *RLSYS, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | (env or {}),
    )  # fmt: skip
    with watch.over(lambda: [process.pid]):
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return watch.seen, output


def format_table(found: set[Listener], table: Iterable[Entry] = TABLE) -> str:
    """Format listeners for the output of a test: process, kind, address, guard."""
    lines = []
    for one in sorted(found, key=lambda one: (one.command, one.address)):
        guard = entry.guard if (entry := entry_of(one, table)) is not None else "?"
        name = re.sub(r"\S*/bin/python\S* (-m )?", "", one.command).split(" --")[0].strip()
        lines.append(f"{name[:40]:42}{one.kind:6}{one.address:58}{guard}")
    return "\n".join(lines)
