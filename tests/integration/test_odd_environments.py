"""A run in environments that machines have: what becomes of it is the table of docs/reliability.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlsys.config import dump_config, load_config
from rlsys.obs.metrics import read_metrics
from tests.helpers.runs import RLSYS, ROOT, TINY, checked_ledger, logs_of

pytestmark = pytest.mark.integration

DEAD = "http://127.0.0.1:9"
PROXIES = {name: DEAD for p in ("http", "https", "all") for name in (f"{p}_proxy", f"{p.upper()}_PROXY")}
STEPS = 2
TABLE = ROOT / "docs" / "reliability.md"


@dataclass(frozen=True)
class Case:
    """`before`: a shell command that makes the environment. `own`: namespaces for it, which root can make. `line`: a
    pattern of the one error; None where the run trains."""

    row: str
    before: str = "true"
    env: dict[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    line: str | None = None
    words: tuple[str, ...] = ()


CASES = {
    "proxies": Case("`http_proxy`, `https_proxy` and `all_proxy` name a dead port", env=PROXIES),
    "shared memory": Case(
        "`/dev/shm` of 64 MB", "mount -t tmpfs -o size=64m tmpfs /dev/shm", own=("--mount",),
        words=("weights.method=auto",),
    ),
    "descriptors": Case(
        "256 file descriptors (hard limit)", "ulimit -n 256", line=r"256 .*descriptors|descriptors.* 256"
    ),
    "TMPDIR": Case(
        "a `TMPDIR` longer than the path of a Unix socket", 'mkdir -p "$TMPDIR"', env={"TMPDIR": "d" * 120}
    ),
    "IPv6": Case(
        "IPv6 only: no 127.0.0.1", "ip link set lo up && ip addr del 127.0.0.1/8 dev lo", own=("--net",),
        line=r"127\.0\.0\.1",
    ),
    "disk": Case(
        "a disk that is full at a checkpoint", "mount -t tmpfs -o size=4m tmpfs {run}/checkpoints", own=("--mount",),
        line=r"checkpoints/.*the disk is full",
    ),
}  # fmt: skip


def launch(case: Case, run: Path, tmp: Path) -> subprocess.CompletedProcess[str]:
    (run / "checkpoints").mkdir(parents=True)
    env = {**os.environ, **case.env}
    if "TMPDIR" in case.env:
        env["TMPDIR"] = str(tmp / case.env["TMPDIR"])
    words = [f"run.dir={run}", *TINY, "parallel.ep=1", f"trainer.steps={STEPS}", "rollout.over_provision=1"]
    config = load_config(Path("configs/quickstart.yaml"), [*words, *case.words])
    (run / "config.yaml").write_text(dump_config(config))  # so that the folder of checkpoints is the run's
    command = [*RLSYS, "train", "configs/quickstart.yaml", *words, *case.words]
    shell = ["sh", "-c", f'{case.before.format(run=run)} && exec "$@"', "sh", *command]
    prefix = ["unshare", *case.own] if case.own else []
    return subprocess.run([*prefix, *shell], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", CASES)
def test_a_run_trains_or_fails_with_a_one_line_error(name: str, tmp_path: Path) -> None:
    case, run = CASES[name], tmp_path / "run"
    if case.own and (os.geteuid() != 0 or shutil.which("unshare") is None):
        pytest.skip("needs root, for a mount or a network of its own")
    process = launch(case, run, tmp_path)
    print(process.stdout[-2000:], process.stderr[-4000:], logs_of(run)[-4000:])
    assert "Traceback" not in process.stderr
    if case.line is None:
        assert process.returncode == 0
        assert read_metrics(run).last_step == STEPS
        checked_ledger(run)
    else:
        errors = [line for line in process.stderr.splitlines() if line.startswith("rlsys: error: ")]
        assert process.returncode in (1, 2) and len(errors) == 1
        assert re.search(case.line, errors[0]), errors


def test_the_table_has_each_environment() -> None:
    assert all(case.row in TABLE.read_text(encoding="utf-8") for case in CASES.values())
