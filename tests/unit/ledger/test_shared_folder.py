"""A run folder that other machines see: the ledger's journal, and readers who are not allowed into its file."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from rlsys.cli import main
from rlsys.core.errors import UserError
from rlsys.core.owner import claim
from rlsys.core.sockets import make_folder
from rlsys.core.types import Prompt
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.obs import coordinator
from rlsys.obs.filesystem import is_local, kind_in
from tests.helpers.rollout_rig import make_config, rig
from tests.helpers.service_rig import served, ticking
from tests.helpers.supervisor_stage import wait_until

FILE_NAME = "rollouts.sqlite"
ROOT = Path(__file__).resolve().parents[3]
MOUNTS = "27 1 254:0 / / rw - ext4 /dev/vda rw\n30 27 0:40 / {folder} rw - {kind} server:/runs rw\n"


@pytest.fixture
def nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on NFS, as the kernel tells it."""
    plain = Path.read_text

    def told(path: Path, *args: object, **kwargs: object) -> str:
        if str(path) == "/proc/self/mountinfo":
            return MOUNTS.format(folder=os.path.realpath(tmp_path), kind="nfs4")
        return plain(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", told)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/run", "ext4"),
        ("/scratch/run", "lustre"),
        ("/scratch2", "ext4"),
        ("/my runs/1", "fuse.sshfs"),
    ],
)
def test_the_longest_mount_counts(path: str, kind: str) -> None:
    lines = [
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
        "28 27 0:40 / /scratch rw,relatime shared:2 - lustre ost@tcp:/scratch rw",
        "29 27 0:41 / /my\\040runs rw - fuse.sshfs me@there:/ rw",
    ]
    assert kind_in(lines, Path(path)) == kind


def issue_one(buffer: RolloutBuffer) -> None:
    buffer.issue(Prompt(0, "", [1], {}), [1])
    buffer.flush()


def test_wal_is_not_used_on_a_shared_file_system(nfs: Path) -> None:
    """Before: WAL everywhere, whose index is shared memory of one machine."""
    buffer = RolloutBuffer(nfs / FILE_NAME, "run", 8)
    issue_one(buffer)
    file_names = {p.name for p in nfs.iterdir()}
    assert not file_names & {f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}
    reader = sqlite3.connect(nfs / FILE_NAME, timeout=0)
    with closing(reader), pytest.raises(sqlite3.OperationalError, match="locked"):
        reader.execute("SELECT count(*) FROM groups").fetchone()
    buffer.close()
    assert RunReader(nfs).ledger().issued_groups == 1


def test_a_folder_may_move_from_one_kind_to_the_other(nfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for issued, local in enumerate((True, False, True)):
        with monkeypatch.context() as m:
            m.setattr("rlsys.ledger.store.is_local", lambda _, local=local: local)
            buffer = RolloutBuffer(nfs / FILE_NAME, "run", 8)
            assert buffer.next_group_id == issued
            issue_one(buffer)
            (mode,) = buffer.read(lambda db: db.execute("PRAGMA journal_mode").fetchone())
            assert mode == ("wal" if local else "truncate")
            buffer.close()
    check_ledger(RunReader(nfs).ledger())


def test_a_reader_ignores_the_uncommitted_writes_of_a_killed_writer(nfs: Path) -> None:
    """A journal to undo: a reader recovers a copy, and leaves the folder as it is."""
    code = (
        "import os, signal, sqlite3, sys\nfrom pathlib import Path\n"
        "from rlsys.ledger import store; store.is_local = lambda _: False\n"
        "from rlsys.ledger.buffer import RolloutBuffer; from rlsys.core.types import Prompt\n"
        "b = RolloutBuffer(Path(sys.argv[1]), 'run', 8)\n"
        "b.issue(Prompt(0, '', [1], {}), [1]); b.flush()\n"
        "b.read(lambda db: db.execute('PRAGMA cache_size=1'))\n"
        "for i in range(200): b.issue(Prompt(i, '', list(range(500)), {}), [1])\n"  # spills into the file
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", code, str(nfs / FILE_NAME)], cwd=ROOT)
    assert died.returncode == -signal.SIGKILL
    journal = nfs / f"{FILE_NAME}-journal"
    size = journal.stat().st_size
    assert size > 0
    ledger = RunReader(nfs).ledger()
    check_ledger(ledger)
    assert ledger.issued_groups == 1
    assert journal.stat().st_size == size


async def test_readers_of_a_live_run_query_its_coordinator(
    nfs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = claim(nfs, make_folder())
    monkeypatch.setattr("tests.helpers.service_rig.OWNER", owner)
    config = make_config(nfs)
    async with rig(config) as r, served(r):
        coordinator.publish_address(owner)
        issue_one(r.buffer)
        run = config.run.dir
        assert await ticking(r, main.main, ["ledger", str(run), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["issued"] == 1
        (run / "config.yaml").write_text("model: {path: none}\n")
        assert await ticking(r, main.main, ["status", str(run)]) == 0
        assert "weight version 0" in capsys.readouterr().out
        with pytest.raises(UserError, match=r"locked"), RunReader(run).database() as db:
            db.execute("SELECT count(*) FROM groups").fetchone()


def test_a_reader_on_another_machine_queries_through_the_supervisor(
    nfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.publish_address(claim(nfs))
    hostname = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: f"not-{hostname}")

    def supervisor() -> None:
        wait_until(lambda: "ledger" in (requests := coordinator.take_requests(nfs)) or bool(requests))
        coordinator.write_response(nfs, "ledger", b"the answer")

    thread = threading.Thread(target=supervisor)
    thread.start()
    assert coordinator.query_coordinator(nfs, "ledger") == b"the answer"
    thread.join()
    with pytest.raises(
        coordinator.CoordinatorUnreachable, match=f"supervisor on {hostname} does not respond within 0 s"
    ):
        coordinator.query_coordinator(nfs, "status", timeout_s=0)
    assert coordinator.take_requests(nfs) == [("status", "/status")]


def test_a_mailbox_that_cannot_be_created_is_a_one_line_error(
    nfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.publish_address(claim(nfs))
    hostname = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: f"not-{hostname}")
    (nfs / coordinator.MAILBOX).write_text("a file in its place")
    with pytest.raises(coordinator.CoordinatorUnreachable, match=rf"^{nfs}/\.ask: File exists$"):
        coordinator.query_coordinator(nfs, "status")


def test_the_address_of_an_earlier_or_dead_launch_is_ignored(tmp_path: Path) -> None:
    owner = claim(tmp_path, tmp_path)
    coordinator.publish_address(owner)
    assert coordinator.query_coordinator(tmp_path, "ledger") is None
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(owner.rollout_socket))
        assert coordinator.query_coordinator(tmp_path, "ledger") is None
    claim(tmp_path)
    assert coordinator.query_coordinator(tmp_path, "ledger") is None
    coordinator.withdraw_address(owner)
    assert coordinator.read_address(tmp_path) is None
    assert is_local(tmp_path) in (True, False)
