"""Every listening socket of a run: whose it is, where it may be, and what keeps strangers out. docs/cluster.md has
the same table in words.
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
    """`command`: a pattern of the process's command line. `guard`: what authenticates a client. `anywhere`: a
    listener of the scheduler, which nobody can bind to an address."""

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
"""Before the others: the command line of srun has that of the role."""
RAY = (
    Entry(
        "tcp", r"ray::|/ray/|launch\.backend=ray", "Ray's own processes: the token that this launch has made"
    ),
    Entry("unix", r"ray::|/ray/", "a folder of the run's user alone"),
)
"""Further ones of a run whose backend starts a Ray of its own."""


def entry_of(listener: Listener, table: Iterable[Entry] = TABLE) -> Entry | None:
    return next(
        (e for e in table if e.kind == listener.kind and re.search(e.command, listener.command)), None
    )


def faults(
    found: Iterable[Listener], addresses: Iterable[str] = (), table: Iterable[Entry] = TABLE
) -> list[str]:
    """What is wrong with listeners. `addresses`: those that the config names, besides loopback."""
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
    """Collects listeners until the block ends."""

    def __init__(self) -> None:
        self.seen: set[Listener] = set()

    @contextmanager
    def over(self, roots: Callable[[], Iterable[int]]) -> Iterator[None]:
        """`roots`: processes whose trees are looked at."""
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


def watched(
    *words: str, before: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> tuple[set[Listener], str]:
    """What listened while `rlsys WORDS` ran to its end, and its output. `before`: words that start it."""
    watch = Watch()
    process = subprocess.Popen(
        [*before, *RLSYS, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | (env or {}),
    )  # fmt: skip
    with watch.over(lambda: [process.pid]):
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return watch.seen, output


def table_of(found: set[Listener], table: Iterable[Entry] = TABLE) -> str:
    """For the eyes of whoever reads the test's output: process, address, guard."""
    lines = []
    for one in sorted(found, key=lambda one: (one.command, one.address)):
        guard = entry.guard if (entry := entry_of(one, table)) is not None else "?"
        name = re.sub(r"\S*/bin/python\S* (-m )?", "", one.command).split(" --")[0].strip()
        lines.append(f"{name[:40]:42}{one.kind:6}{one.address:58}{guard}")
    return "\n".join(lines)
