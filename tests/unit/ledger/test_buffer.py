"""The buffer: what survives a crash at any commit, which moves are legal, which files are refused."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsys.core.errors import RunError, UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import GroupState, Prompt, SampleGroup, Segment, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.store import FILE_NAME

SIZE = 2


def make_prompt(index: int) -> Prompt:
    return Prompt(index, f"prompt {index}", [1, 2, index % 100], {})


def issue(buffer: RolloutBuffer) -> SampleGroup:
    return buffer.issue(make_prompt(buffer.next_group_id), [11, 12])


def grow(group: SampleGroup, version: int, tokens: int = 3) -> None:
    """New tokens for every sample; log-probs that float32 cannot hold."""
    for s in group.samples:
        first = len(s.response_ids)
        mu = [-(first + i + 1) / 7 for i in range(tokens)]
        s.append(Segment(list(range(first, first + tokens)), mu, [VersionSpan(version, 0, tokens)]))


def complete(buffer: RolloutBuffer, group: SampleGroup, version: int) -> None:
    grow(group, version)
    for s in group.samples:
        s.status, s.reward = Status.FINISHED, 0.5
    buffer.finish(group, GroupState.READY)


def whole(buffer: RolloutBuffer, step: int) -> tuple[int, list[SampleGroup]]:
    """What a step took, with its tokens."""
    version, groups = buffer.read_step(step)
    return version, [replace(g, samples=buffer.load(g.samples)) for g in groups]


class Opener:
    """Opens the file of one run; opening it again closes it first, as a restart would."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._open: RolloutBuffer | None = None

    def __call__(self) -> RolloutBuffer:
        self.close()
        self._open = RolloutBuffer(self._path, "run a", SIZE)
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path)
    yield opener
    opener.close()


@pytest.fixture
def buffer(reopen: Opener) -> RolloutBuffer:
    return reopen()


def test_a_parked_sample_is_restored_bit_for_bit(buffer: RolloutBuffer, reopen: Opener) -> None:
    version = buffer.versions.new(0)
    group = issue(buffer)
    grow(group, version)
    grow(group, buffer.versions.new(1), tokens=2)
    sample = group.samples[1]
    sample.status, sample.resumes, sample.engine = Status.IN_FLIGHT, 3, "http://e:1"
    sample.cached_tokens, sample.prefilled_tokens = 5, 9
    buffer.save(group.samples)
    back = reopen()
    sample.status = Status.PARKED  # nothing is in flight in a process that has just begun
    assert back.groups == {0: group}
    assert back.versions.newest == 2


def test_a_sample_keeps_the_prompt_that_it_was_drawn_from(tmp_path: Path) -> None:
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run a", 3)
    group = buffer.issue(make_prompt(0), [11, 12])
    (added,) = buffer.grow(group, [13], prompt_ids=(1, 0))
    assert (added.prompt_ids, added.trained_prompt) == ([1, 0], [1, 2, 0])
    grow(group, buffer.versions.new(0))
    buffer.save(group.samples)
    buffer.close()
    back = RolloutBuffer(tmp_path / FILE_NAME, "run a", 3)
    assert back.groups == {0: group}
    back.close()


def test_ready_groups_keep_their_order_of_completion(buffer: RolloutBuffer, reopen: Opener) -> None:
    version = buffer.versions.new(0)
    groups = [issue(buffer) for _ in range(3)]
    for i in (2, 0, 1):
        complete(buffer, groups[i], version)
    back = reopen()
    assert [g.group_id for g in back.ready()] == [2, 0, 1]
    assert back.ready()[0] == groups[2]


def test_a_step_takes_the_same_groups_again_after_restore(buffer: RolloutBuffer, reopen: Opener) -> None:
    version = buffer.versions.new(0)
    groups = [issue(buffer) for _ in range(4)]
    for i in (3, 1, 0, 2):
        complete(buffer, groups[i], version)
    buffer.take(1, buffer.ready()[:2])
    second = buffer.versions.new(1)
    buffer.take(2, buffer.ready()[:2])
    back = reopen()
    back.restore(0)
    assert back.counts == {GroupState.READY: 4, GroupState.TRAINED: 0}
    assert back.ready() == []  # reserved: nobody else can take them
    back.versions.new(0)
    assert [g.group_id for g in back.read_step(1)[1]] == [1, 3]
    assert whole(back, 1) == (version, [groups[1], groups[3]])
    back.versions.new(1)
    assert whole(back, 2) == (second, [groups[0], groups[2]])
    assert back.counts[GroupState.TRAINED] == 4
    check_ledger(back.ledger())


def test_ages_count_train_steps_not_pushes(buffer: RolloutBuffer) -> None:
    group = issue(buffer)
    grow(group, buffer.versions.new(0))
    assert buffer.versions.age(group, 0) == 0
    buffer.versions.new(1)
    assert buffer.versions.age(group, 1) == 1
    buffer.versions.new(0)  # a restart from the first checkpoint: the same weights under a new version
    assert buffer.versions.age(group, 0) == 0
    with pytest.raises(RunError, match="weight version 9"):
        buffer.versions.trained_steps(9)


def test_illegal_moves_are_refused(buffer: RolloutBuffer) -> None:
    version = buffer.versions.new(0)
    group = issue(buffer)
    with pytest.raises(RunError, match=r"has \d unfinished samples; expected none in the state ready"):
        buffer.finish(group, GroupState.READY)
    complete(buffer, group, version)
    with pytest.raises(RunError, match="expected active"):
        buffer.save(group.samples)


def test_a_failed_method_leaves_the_file_as_it_was_and_ends_writing(
    buffer: RolloutBuffer, reopen: Opener
) -> None:
    version = buffer.versions.new(0)
    ready, active = issue(buffer), issue(buffer)
    complete(buffer, ready, version)
    with pytest.raises(RunError, match="group 1: state trained cannot follow active"):
        buffer.take(1, [ready, active])
    with pytest.raises(RunError, match="writes are refused"):
        issue(buffer)
    back = reopen()
    assert [g.group_id for g in back.ready()] == [0]
    check_ledger(back.ledger())


def test_steps_take_in_order(buffer: RolloutBuffer) -> None:
    complete(buffer, issue(buffer), buffer.versions.new(0))
    with pytest.raises(RunError, match="train step 2 cannot take groups: expected step 1"):
        buffer.take(2, buffer.ready())


def test_a_checkpoint_from_elsewhere_is_refused(buffer: RolloutBuffer) -> None:
    with pytest.raises(UserError, match="has 0 train steps, but the checkpoint has 7"):
        buffer.restore(7)


def test_pruned_arrays_bar_older_checkpoints(buffer: RolloutBuffer) -> None:
    for step in (1, 2):
        complete(buffer, issue(buffer), buffer.versions.new(step - 1))
        buffer.take(step, buffer.ready())
    buffer.prune(1)
    check_ledger(buffer.ledger())
    with pytest.raises(UserError, match="the checkpoint is of step 0; expected step 1 or later"):
        buffer.restore(0)
    buffer.restore(1)
    assert [g.group_id for g in buffer.read_step(2)[1]] == [1]


def test_dead_groups_keep_their_counts_but_not_their_arrays(buffer: RolloutBuffer, tmp_path: Path) -> None:
    group = issue(buffer)
    grow(group, buffer.versions.new(0))
    buffer.finish(group, GroupState.EXPIRED)
    buffer.flush()
    ledger = buffer.ledger()
    assert ledger.groups["expired"] == 1
    assert ledger.tokens["expired"] == 6
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        assert db.execute("SELECT count(*) FROM pieces").fetchone() == (0,)
    assert not buffer._sample_rows._stored_lengths, (
        "what was written is known of samples that live, and of no others"
    )


def test_lost_tokens_accumulate_over_sessions(buffer: RolloutBuffer, reopen: Opener) -> None:
    buffer.add_lost_tokens(3)
    back = reopen()
    back.add_lost_tokens(4)
    assert back.ledger().lost_tokens == 7
    with pytest.raises(RunError, match="7 tokens that engines generated"):
        check_ledger(back.ledger())


def test_a_full_disk_ends_the_run_and_preserves_committed_data(buffer: RolloutBuffer, reopen: Opener) -> None:
    version = buffer.versions.new(0)
    complete(buffer, issue(buffer), version)
    buffer.flush()
    pages = buffer._db.execute("PRAGMA page_count").fetchone()[0]
    buffer._db.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(RunError, match=r"rollouts.sqlite: cannot read or write: database or disk is full"):
        for _ in range(1000):
            group = issue(buffer)
            grow(group, version, tokens=200)
            buffer.save(group.samples)
    with pytest.raises(RunError, match="writes are refused"):
        buffer.versions.new(1)
    back = reopen()
    check_ledger(back.ledger())
    assert [g.group_id for g in back.ready()] == [0]


class FailsToCommit:
    """A connection before a disk that is full at the commit; SQLite has undone the transaction by then, or not."""

    def __init__(self, db: sqlite3.Connection, undone: bool) -> None:
        self._db, self._undone = db, undone

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement != "COMMIT":
            return self._db.execute(statement, *values)
        if self._undone:
            self._db.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    def __getattr__(self, name: str) -> object:
        return getattr(self._db, name)


@pytest.mark.parametrize("undone", [False, True])
def test_nothing_is_written_after_a_failed_commit(
    buffer: RolloutBuffer, reopen: Opener, undone: bool
) -> None:
    """Else the next pieces of a sample would be committed without those before them, and no start could read it."""
    version, group = buffer.versions.new(0), issue(buffer)
    grow(group, version)
    buffer.save(group.samples)
    buffer.flush()
    grow(group, version)
    buffer.save(group.samples)
    writer = buffer._file
    disk, writer.db = writer.db, FailsToCommit(writer.db, undone)  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"rollouts.sqlite: cannot read or write: database or disk is full"):
        buffer.flush()
    writer.db = disk  # there is room again: too late
    grow(group, version)
    with pytest.raises(RunError, match=r"writes are refused after an error: .*database or disk is full"):
        buffer.save(group.samples)
    back = reopen()
    assert [len(s.response_ids) for s in back.groups[0].samples] == [3, 3]
    check_ledger(back.ledger())


# Files that are not ours to write


def refused(path: Path, match: str, identity: str = "run a") -> None:
    bytes_before = path.read_bytes()
    with pytest.raises(UserError, match=match):
        RolloutBuffer(path, identity, SIZE)
    assert path.read_bytes() == bytes_before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"my notes, not yours\n" * 100)
    refused(path, "not a usable ledger")


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE songs (title)")
    db.close()
    refused(path, "not one of rlsys")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    buffer = RolloutBuffer(path, "run a", SIZE)
    version = buffer.versions.new(0)
    for _ in range(200):
        complete(buffer, issue(buffer), version)
    buffer.close()
    data = bytearray(path.read_bytes())
    for offset in range(4096, len(data), 4096):
        data[offset : offset + 64] = os.urandom(64)
    path.write_bytes(data)
    refused(path, "damaged|not a usable ledger")


def test_another_runs_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    buffer = RolloutBuffer(path, "run a", SIZE)
    issue(buffer)
    buffer.close()
    refused(path, "rollouts of another config", identity="run b")


def test_a_file_without_a_group_serves_another_config(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    RolloutBuffer(path, "run a", SIZE + 1).close()
    buffer = RolloutBuffer(path, "run b", SIZE)
    issue(buffer)
    buffer.close()
    refused(path, "rollouts of another config", identity="run a")


def test_an_empty_file_left_by_a_crash_is_reinitialized(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.touch()
    RolloutBuffer(path, "run a", SIZE).close()


def test_a_second_writer_is_refused_until_the_first_exits(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    hold = (
        "import sys; from pathlib import Path; from rlsys.ledger.buffer import RolloutBuffer\n"
        f"b = RolloutBuffer(Path({str(path)!r}), 'run a', 2); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        with pytest.raises(UserError, match=f"in use by process {writer.pid}"):
            RolloutBuffer(path, "run a", SIZE)
        writer.kill()
    RolloutBuffer(path, "run a", SIZE).close()


# Any history, with a crash anywhere

# In memory where there is such a place: thousands of commits, each of which would wait for the disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Histories(RuleBasedStateMachine):
    """Random legal histories of a run; `crash` reopens what was committed, as kill -9 would leave it.

    The model is what a trainer has been told: once `take` answered, the groups of that step are fixed.
    """

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.buffer = RolloutBuffer(self.folder / FILE_NAME, "run a", SIZE)
        self.told: dict[int, list[int]] = {}  # step -> groups, as answered
        self.step = 0  # steps of the trainer
        self.versions: list[int] = []
        self.push()

    def push(self) -> None:
        self.versions.append(self.buffer.versions.new(self.step))
        self.buffer.flush()

    @rule()
    def issue(self) -> None:
        issue(self.buffer)

    @precondition(lambda self: self.buffer.active())
    @rule(data=st.data(), save=st.booleans())
    def stream(self, data: st.DataObject, save: bool) -> None:
        group = data.draw(st.sampled_from(self.buffer.active()))
        grow(group, self.buffer.versions.newest, 1)
        if save:
            self.buffer.save(group.samples)

    @precondition(lambda self: self.buffer.active())
    @rule(data=st.data(), state=st.sampled_from(["ready", "filtered", "censored", "expired"]))
    def finish(self, data: st.DataObject, state: str) -> None:
        group = data.draw(st.sampled_from(self.buffer.active()))
        for s in group.samples:
            s.status = Status.CENSORED if state == "censored" else Status.FINISHED
        self.buffer.finish(group, GroupState(state))

    @precondition(lambda self: self.buffer.ready())
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        self.buffer.finish(data.draw(st.sampled_from(self.buffer.ready())), GroupState.EXPIRED)

    @precondition(lambda self: self.step < self.buffer.last_taken_step or self.buffer.ready())
    @rule(n=st.integers(1, 3), answered=st.booleans())
    def take(self, n: int, answered: bool) -> None:
        step = self.step + 1
        if step > self.buffer.last_taken_step:
            self.buffer.take(step, self.buffer.ready()[:n])
        if not answered:
            return  # the trainer died, or asks again
        self.buffer.flush()
        ids = [g.group_id for g in self.buffer.read_step(step)[1]]
        assert self.told.setdefault(step, ids) == ids
        self.step = step
        self.push()

    @precondition(lambda self: self.step)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.step = data.draw(st.integers(0, self.step))
        self.buffer.restore(self.step)
        self.push()

    @rule()
    def flush(self) -> None:
        self.buffer.flush()

    @rule()
    def crash(self) -> None:
        """A copy of the files as they are now is all that a killed process leaves."""
        crash_folder = Path(tempfile.mkdtemp(dir=MEMORY))
        shutil.copytree(self.folder, crash_folder, dirs_exist_ok=True)
        self.buffer.close()
        shutil.rmtree(self.folder)
        self.folder = crash_folder
        self.buffer = RolloutBuffer(crash_folder / FILE_NAME, "run a", SIZE)
        assert all(s.status is not Status.IN_FLIGHT for g in self.buffer.active() for s in g.samples)
        self.buffer.restore(self.step)
        self.push()

    @invariant()
    def adds_up(self) -> None:
        check_ledger(self.buffer.ledger())
        self.buffer.check_counts()

    @invariant()
    def versions_are_never_reused(self) -> None:
        assert self.versions == sorted(set(self.versions))

    @invariant()
    def tokens_are_whole(self) -> None:
        for group in self.buffer.groups.values():
            for s in group.samples:
                assert list(s.response_ids) == list(range(len(s.mu)))

    def teardown(self) -> None:
        self.buffer.close()
        shutil.rmtree(self.folder)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
