"""Every listening socket of a real run is loopback or an address of the config, and is in the table of sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.servers import ROOT
from tests.helpers.sessions import SMALL
from tests.helpers.socket_table import TABLE, entry_of, format_table, run_and_watch, violations

pytestmark = pytest.mark.integration

MODEL = "model.path=configs/models/quickstart-moe"

TINY = (*SMALL, "trainer.steps=2", "rollout.groups_per_step=4", "eval.prompts=4")


@pytest.mark.parametrize("method", ["auto", "broadcast"])
def test_every_socket_of_a_run_is_loopback_and_in_the_table(method: str, tmp_path: Path) -> None:
    """Two trainer ranks, so that process groups have peers."""
    words = (f"run.dir={tmp_path / 'run'}", f"weights.method={method}", "parallel.ep=2", *TINY)
    listeners, _ = run_and_watch("train", "quickstart", *words)
    print(format_table(listeners))
    assert violations(listeners) == []
    kinds = {entry_of(listener) for listener in listeners}
    assert {TABLE[0], TABLE[2]} <= kinds, "engine and rollout process listen, and were seen"


def test_neither_a_long_tmpdir_nor_a_host_name_without_address_ends_a_run(tmp_path: Path) -> None:
    """TMPDIR is longer than the path of a Unix socket may be. Before: the engine died of it, and ranks looked for
    their own machine by its name, for 300 s at a time."""
    long = tmp_path / ("d" * 120)
    long.mkdir()
    words = (f"run.dir={tmp_path / 'run'}", "weights.method=auto", *TINY)
    nameless = (
        ("unshare", "--uts", "sh", "-c", 'hostname nosuchhost; exec "$@"', "sh") if os.geteuid() == 0 else ()
    )
    listeners, _ = run_and_watch("train", "quickstart", *words, before=nameless, env={"TMPDIR": str(long)})
    assert violations(listeners) == []


def test_fine_tuning_opens_no_external_socket(tmp_path: Path) -> None:
    config = ROOT / "configs" / "quickstart_sft.yaml"
    listeners, _ = run_and_watch("sft", str(config), f"run.dir={tmp_path / 'run'}", MODEL, "trainer.steps=2")
    print(format_table(listeners))
    assert violations(listeners) == []


def test_a_process_started_manually_listens_only_on_loopback(tmp_path: Path) -> None:
    code = (
        "import os\nfrom megatron_patches import apply\n"
        "from rlsys.config import load_config\nfrom rlsys.trainer.setup import init_distributed\n"
        "from tests.helpers.listeners import listeners\n"
        "from pathlib import Path\n"
        "init_distributed(load_config(Path('configs/quickstart.yaml'), []))\n"
        "print(sorted(one.address for one in listeners(os.getpid())))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    addresses = eval(process.stdout.splitlines()[-1])
    assert [a for a in addresses if not a.startswith("127.")] == []
