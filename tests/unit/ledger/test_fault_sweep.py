"""Every call to the disk of ledger, run folder and checkpoints fails once, in every way; then all of it adds up.

The sites are not chosen: a clean pass counts them, and each is failed in a pass of its own. What was acknowledged
before the fault must be there afterwards, and what is there must be whole.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.rundir import open_run_dir
from rlsys.config import Config, load_config
from rlsys.core.errors import RlsysError
from rlsys.core.owner import claim, current_owner
from rlsys.core.spans import VersionSpan
from rlsys.core.types import GroupState, Prompt, Segment, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_conservation
from rlsys.ledger.reader import RunReader
from rlsys.ledger.store import FILE_NAME
from rlsys.obs import coordinator
from tests.helpers.faults import Sites, python_calls, sqlite_calls, sqlite_library

Scenario = Callable[[Path, Sites], None]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is such a folder: thousands of fsyncs, and no power cut to survive."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def sweep(tmp_path: Path, scenario: Scenario, check: Callable[[Path, str], None]) -> Sites:
    """The clean pass. `check` gets the folder after each fault, and which it was."""
    clean = Sites()
    (tmp_path / "clean").mkdir()
    scenario(tmp_path / "clean", clean)
    check(tmp_path / "clean", "no fault")
    for number, kind in clean.faults():
        sites, folder = Sites((number, kind)), tmp_path / f"{number}-{kind}"
        folder.mkdir()
        description = f"{kind} in call {number}, {clean.calls[number]}"
        try:
            scenario(folder, sites)
        except RlsysError as e:
            assert "\n" not in str(e), description
        except OSError as e:
            raise AssertionError(f"{description}: not told in a line of ours: {e!r}") from e
        assert len(sites.calls) > number, f"{description}: not reached"
        check(folder, description)
        shutil.rmtree(folder)
    return clean


# -- the ledger ----------------------------------------------------------------------------------------------


ACKNOWLEDGED: dict[Path, list[tuple[int, int]]] = {}
"""By folder: groups issued and steps taken when a flush returned."""


def write_ledger(folder: Path) -> None:
    """Groups issued, sampled and taken; given back and pruned by another launch."""
    acknowledged = ACKNOWLEDGED[folder] = []
    with closing(RolloutBuffer(folder / FILE_NAME, "run", 2, claim(folder))) as buffer:
        version = buffer.versions.new(0)
        for step in (1, 2):
            groups = [buffer.issue(Prompt(i, "", [1, 2, 3], {}), [1, 2]) for i in range(2)]
            buffer.flush()
            acknowledged.append((buffer.next_group_id, buffer.last_taken_step))
            for group in groups:
                for s in group.samples:
                    s.append(Segment([7] * 300, [-0.5] * 300, [VersionSpan(version, 0, 300)], "stop"))
                    s.status = Status.FINISHED
                buffer.finish(group, GroupState.READY)
            buffer.take(step, buffer.ready()[:1])
            buffer.flush()
            acknowledged.append((buffer.next_group_id, buffer.last_taken_step))
    with closing(RolloutBuffer(folder / FILE_NAME, "run", 2, claim(folder))) as buffer:
        buffer.restore(1)
        buffer.read_step(2)
        buffer.prune(1)
        buffer.flush()


def check_ledger(folder: Path, what: str) -> None:
    acknowledged = ACKNOWLEDGED[folder]
    if not (folder / FILE_NAME).exists():
        assert not acknowledged, what
        return
    buffer = RolloutBuffer(folder / FILE_NAME, "run", 2, claim(folder))
    check_conservation(buffer.ledger())
    buffer.check_counts()
    issued, last_step = acknowledged[-1] if acknowledged else (0, 0)
    assert buffer.next_group_id >= issued, what
    assert buffer.last_taken_step >= last_step, what
    for group in buffer.ready() + buffer.active():
        assert all(len(s.response_ids) == len(s.mu) for s in group.samples), what
    buffer.issue(Prompt(9, "", [1], {}), [1])
    buffer.close()
    check_conservation(RunReader(folder).ledger())


@pytest.mark.gate
@pytest.mark.parametrize("local", [True, False], ids=["wal", "rollback journal"])
def test_the_ledger_survives_a_failure_of_each_sqlite_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    library = sqlite_library()
    if library is None:
        pytest.skip("Python's sqlite3 has SQLite built in: its calls are out of reach")
    monkeypatch.setattr("rlsys.ledger.store.is_local", lambda _: local)

    def scenario(folder: Path, sites: Sites) -> None:
        with sqlite_calls(sites, library):
            write_ledger(folder)

    clean = sweep(tmp_path, scenario, check_ledger)
    assert {"open", "write", "fsync"} <= set(clean.calls)
    assert len(clean.faults()) > 100
    print(f"{len(clean.calls)} sites, {len(clean.faults())} faults")


def test_the_ledger_survives_a_failure_of_each_python_call(tmp_path: Path) -> None:
    """The launch's claim, the lock beside the file, the looks at who owns the run."""

    def scenario(folder: Path, sites: Sites) -> None:
        with python_calls(sites):
            write_ledger(folder)

    clean = sweep(tmp_path, scenario, check_ledger)
    print(f"{len(clean.calls)} sites, {len(clean.faults())} faults")


# -- the run folder ------------------------------------------------------------------------------------------


@pytest.mark.gate
def test_the_run_folder_survives_a_failure_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.core.sockets._sweep", lambda _: None)  # what others leave differs between runs

    def config_of(folder: Path) -> Config:
        return Config.model_validate({"model": {"path": tmp_path}, "run": {"dir": folder / "run"}})

    def scenario(folder: Path, sites: Sites) -> None:
        config = config_of(folder)
        with python_calls(sites):
            for _ in range(2):  # made, and opened again
                with open_run_dir(config, lambda _: None) as run_dir:
                    coordinator.publish_address(run_dir.owner)

    def check(folder: Path, what: str) -> None:
        config = config_of(folder)
        config_path = config.run.dir / "config.yaml"
        assert not config_path.exists() or load_config(config_path) == config, what
        with open_run_dir(config, lambda _: None) as run_dir:
            run_dir.owner.check()
            assert current_owner(config.run.dir) == run_dir.owner, what
        published = config.run.dir / coordinator.FILE_NAME
        assert not published.exists() or coordinator.read_address(config.run.dir) is not None, what

    clean = sweep(tmp_path, scenario, check)
    assert {"open", "write", "fsync", "rename", "mkdir", "unlink"} <= set(clean.calls)
    print(f"{len(clean.calls)} sites, {len(clean.faults())} faults")


# -- checkpoints ---------------------------------------------------------------------------------------------


class Alone:
    """Control of a single rank."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def wait_for_all(self) -> None: ...


class WrittenAtOnce:
    """Stands for megatron's writer: a failure of its own is told by `error`."""

    error: str | None = None
    seconds = 0.5

    def __init__(self, _request: object, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, str] = {}
        try:
            for name in (".metadata", "__0_0.distcp"):
                (folder / name).write_bytes(name.encode() * 100)
        except OSError as e:
            self.error = str(e)

    def is_done(self, wait: bool) -> bool:
        return wait

    def finalize(self) -> None: ...


def test_checkpoints_survive_a_failure_of_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsys.trainer.checkpoints import checkpoint, manifest

    monkeypatch.setattr(checkpoint, "dist", SimpleNamespace(get_rank=lambda: 0))
    monkeypatch.setattr(checkpoint, "_state", lambda *_, **__: {})
    for attribute in (
        "_replica_group",
        "get_default_save_sharded_strategy",
        "FullyParallelSaveStrategyWrapper",
    ):
        monkeypatch.setattr(checkpoint, attribute, lambda *_: None)
    monkeypatch.setattr(checkpoint, "TensorWrite", WrittenAtOnce)
    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", lambda *_, **__: None)
    policy: Any = SimpleNamespace(model=SimpleNamespace(lora=None))
    acknowledged: dict[Path, int] = {}

    def scenario(folder: Path, sites: Sites) -> None:
        acknowledged[folder] = 0
        with python_calls(sites):
            saved = checkpoint.Checkpoints(folder / "checkpoints", 1, Alone())  # type: ignore[arg-type]
            for step in (1, 2, 3):
                saved.begin(step, [policy], score=1.0 / step)
                acknowledged[folder] = saved.finish(wait=True) or 0

    def check(folder: Path, what: str) -> None:
        saved_steps = checkpoint.steps(folder / "checkpoints")
        assert max(saved_steps, default=0) >= acknowledged[folder], what
        for step in saved_steps:
            assert manifest.find_damage(checkpoint.path_of(folder / "checkpoints", step)) == [], what
        again = checkpoint.Checkpoints(folder / "checkpoints", 1, Alone())  # type: ignore[arg-type]
        again.begin(9, [policy])
        assert again.finish(wait=True) == 9, what

    clean = sweep(tmp_path, scenario, check)
    assert {"open", "write", "fsync", "rename", "mkdir", "unlink"} <= set(clean.calls)
    print(f"{len(clean.calls)} sites, {len(clean.faults())} faults")


def test_the_sweep_detects_an_unreported_fault(tmp_path: Path) -> None:
    def scenario(folder: Path, sites: Sites) -> None:
        with python_calls(sites), suppress(sqlite3.Error):
            (folder / "x").write_text("text")

    with pytest.raises(AssertionError, match="EIO in call 0, open: not told in a line of ours"):
        sweep(tmp_path, scenario, lambda *_: None)
