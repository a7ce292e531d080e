"""Every listening socket of a real run is loopback or an address of the config, and is in the table of sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.listeners import Listener, listeners
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS, SMALL
from tests.helpers.socket_table import TABLE, entry_of, faults

pytestmark = pytest.mark.integration

LOOK_SECONDS = 0.2
TINY = (*SMALL, "trainer.steps=2", "rollout.groups_per_step=4", "eval.prompts=4")


class Watch:
    """Collects the listeners of a process's tree until the block ends."""

    def __init__(self) -> None:
        self.seen: set[Listener] = set()

    @contextmanager
    def over(self, pid: int) -> Iterator[None]:
        done = threading.Event()

        def look() -> None:
            while not done.wait(LOOK_SECONDS):
                self.seen |= listeners(pid)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def watched(*words: str, env: dict[str, str] | None = None) -> tuple[set[Listener], str]:
    """What listened while `rlsys WORDS` ran to its end, and its output."""
    watch = Watch()
    process = subprocess.Popen(
        [*RLSYS, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | (env or {}),
    )  # fmt: skip
    with watch.over(process.pid):
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return watch.seen, output


def table_of(found: set[Listener]) -> str:
    """For the eyes of whoever reads the test's output: process, address, guard."""
    lines = []
    for one in sorted(found, key=lambda one: (one.command, one.address)):
        guard = entry.guard if (entry := entry_of(one)) is not None else "?"
        lines.append(f"{one.kind:5}{one.address:45}{one.command[-60:]:62}{guard}")
    return "\n".join(lines)


@pytest.mark.parametrize("method", ["tensor", "broadcast"])
def test_every_socket_of_a_run_is_loopback_and_in_the_table(method: str, tmp_path: Path) -> None:
    """Two trainer ranks, so that process groups have peers. TMPDIR is longer than a socket's path may be."""
    long = tmp_path / ("d" * 120)
    long.mkdir()
    words = (f"run.dir={tmp_path / 'run'}", f"weights.method={method}", "parallel.ep=2", *TINY)
    found, _ = watched("train", "quickstart", *words, env={"TMPDIR": str(long)})
    print(table_of(found))
    assert faults(found) == []
    kinds = {entry_of(one) for one in found}
    assert {TABLE[0], TABLE[2]} <= kinds, "engine and rollout process listen, and were seen"


def test_fine_tuning_listens_to_nobody_outside(tmp_path: Path) -> None:
    config = ROOT / "configs" / "quickstart_sft.yaml"
    found, _ = watched("sft", str(config), f"run.dir={tmp_path / 'run'}", "sft.steps=2")
    print(table_of(found))
    assert faults(found) == []


def test_a_process_started_by_hand_listens_to_nobody(tmp_path: Path) -> None:
    code = (
        "import os\nfrom megatron_patches import apply\n"
        "from rlsys.config import load_config\nfrom rlsys.trainer.setup import init_distributed\n"
        "from tests.helpers.listeners import listeners\n"
        "from pathlib import Path\n"
        "init_distributed(load_config(Path('configs/quickstart.yaml'), []))\n"
        "print(sorted(one.address for one in listeners(os.getpid())))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    addresses = eval(done.stdout.splitlines()[-1])
    assert [a for a in addresses if not a.startswith("127.")] == []
