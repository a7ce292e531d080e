"""Segment files: what was written is read, what was cut off is absent and counted, what nobody wants is removed."""

from __future__ import annotations

import os
import signal
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.core.errors import RunError, UserError
from rlsys.core.owner import FencedError, claim
from rlsys.core.spans import RouteSpan, VersionSpan
from rlsys.core.types import GroupState, LogProbResult, Prompt, SampleGroup, Segment, Status
from rlsys.ledger import samples, segments
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.ledger.store import FILE_NAME
from rlsys.segments.records import FOLDER, Kind, SequenceKey, decode, encode
from tests.helpers.takeovers import disable_file_locks, run_after_check

ROOT = Path(__file__).resolve().parents[3]


def opened(folder: Path) -> RolloutBuffer:
    return RolloutBuffer(folder / FILE_NAME, "run", 2)


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).iterdir())


def grow(group: SampleGroup, version: int, first: int, tokens: int = 3) -> None:
    """Each sample gets so many tokens, counted up from `first`."""
    for s in group.samples:
        start = len(s.response_ids)
        ids = list(range(first, first + tokens))
        s.append(Segment(ids, [-i / 7 for i in ids], [VersionSpan(version, 0, tokens)], None))
        s.routes.append(RouteSpan(start, start + tokens, bytes(range(tokens))))


def issue(buffer: RolloutBuffer) -> SampleGroup:
    return buffer.issue(Prompt(0, "", [1, 2], {}), [5, 6])


@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    sample=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**32 - 1),
    start=st.integers(0, 2**32 - 1),
    routes=st.binary(max_size=30),
)
def test_a_record_is_read_as_it_was_written(
    ids: list[int], sample: int, sequence: int, start: int, routes: bytes
) -> None:
    mu = [i / 3 for i in ids]
    payload = struct.pack(f"<{len(ids)}i{len(mu)}d", *ids, *mu) + routes
    data = encode(Kind.TOKENS, SequenceKey(sample, sequence, 0), start, len(ids), payload, len(routes))
    record = decode(data, "here")
    assert (record.kind, record.sample_id, record.sequence, record.start) == (
        Kind.TOKENS,
        sample,
        sequence,
        start,
    )
    assert record.ids().tolist() == ids
    assert record.mu().tolist() == mu
    assert bytes(record.route_bytes()) == routes


@given(st.data())
def test_no_changed_byte_passes(data: st.DataObject) -> None:
    record = bytearray(encode(Kind.SCORES, SequenceKey(7), 2, 3, bytes(range(12))))
    offset = data.draw(st.integers(0, len(record) - 1))
    record[offset] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RunError, match=r"^here: damaged"):
        decode(bytes(record), "here")
    with pytest.raises(RunError, match=r"^here: damaged"):
        decode(bytes(record[:offset]), "here")


def test_a_sample_is_restored_with_all_its_fields(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    group, version = issue(buffer), buffer.versions.new(0)
    for first in (10, 20, 30):
        grow(group, version, first)
        buffer.save(group.samples)
    buffer.store_scores([LogProbResult(s.sample_id, 1, [-0.5, -0.25]) for s in group.samples])
    for s in group.samples:
        s.status = Status.FINISHED
    buffer.finish(group, GroupState.READY)
    buffer.take(1, [group])
    (back,) = buffer.read_step(1)[1]
    assert not any(s.response_ids for s in back.samples)
    back.samples = buffer.load(back.samples)
    assert [(s.response_ids, s.mu, s.routes) for s in back.samples] == [
        (s.response_ids, s.mu, s.routes) for s in group.samples
    ]
    assert back.samples[0].behaviour[1:] == [-0.5, -0.25]
    buffer.close()
    assert repr(RunReader(tmp_path).groups("state = 'trained'")) == repr([back]), "NaN is no NaN's equal"


def test_a_reader_sees_only_committed_data_while_the_writer_continues(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    group, version = issue(buffer), buffer.versions.new(0)
    grow(group, version, 10)
    buffer.save(group.samples)
    buffer.flush()
    grow(group, version, 20)
    buffer.save(group.samples)
    assert [list(s.response_ids) for s in RunReader(tmp_path).groups("1")[0].samples] == [[10, 11, 12]] * 2
    buffer.flush()
    assert [len(s.response_ids) for s in RunReader(tmp_path).groups("1")[0].samples] == [6, 6]
    buffer.close()


def test_commits_between_two_queries_of_a_reader_are_invisible_to_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a sample had more tokens in its pieces than in its row, and the reader called the ledger wrong."""
    buffer = opened(tmp_path)
    group, version = issue(buffer), buffer.versions.new(0)
    grow(group, version, 10)
    buffer.save(group.samples)
    buffer.flush()
    plain = samples._interrupts

    def meanwhile(db: sqlite3.Connection, ids: list[int]) -> dict[int, list[tuple[int, int]]]:
        grow(group, version, 20)
        buffer.save(group.samples)
        buffer.flush()
        return plain(db, ids)

    monkeypatch.setattr(samples, "_interrupts", meanwhile)
    views = RunReader(tmp_path).samples(samples.SampleQuery(group=0))
    assert [list(s.sample.response_ids) for s in views] == [[10, 11, 12]] * 2
    buffer.close()


def test_segment_files_are_bounded_in_size_and_deleted_when_unreferenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments.SegmentFile.__init__, "__defaults__", (200,))
    buffer = opened(tmp_path)
    version = buffer.versions.new(0)
    late = issue(buffer)
    for step in (1, 2, 3):
        group = issue(buffer)
        for g in (group, late):
            grow(g, version, 10, tokens=8)
            buffer.save(g.samples)
        for s in group.samples:
            s.status = Status.FINISHED
        buffer.finish(group, GroupState.READY)
        buffer.take(step, [group])
        buffer.flush()
    files_before = files(tmp_path)
    assert len(files_before) > 4 and max(f.stat().st_size for f in files_before) < 400
    buffer.prune(3)
    assert files(tmp_path) == files_before, "before the commit a restart could want them"
    buffer.flush()
    files_after = files(tmp_path)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        referenced_names = {
            row[0] for row in db.execute("SELECT name FROM segments JOIN pieces USING (segment)")
        }
        segment_names = {row[0] for row in db.execute("SELECT name FROM segments")}
    assert (
        len(files_after) < len(files_before)
        and referenced_names <= {f.name for f in files_after} == segment_names
    )
    buffer.close()
    back = opened(tmp_path)
    assert [len(s.response_ids) for s in back.active()[0].samples] == [24, 24], "the late group has all of it"
    back.close()


def test_uncommitted_bytes_of_a_killed_writer_are_dropped_and_counted(tmp_path: Path) -> None:
    """The process dies between a write and its commit, by SIGKILL."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from tests.unit.ledger.test_segments import grow, issue, opened\n"
        "buffer = opened(Path(sys.argv[1]))\n"
        "group, version = issue(buffer), buffer.versions.new(0)\n"
        "grow(group, version, 10)\nbuffer.save(group.samples)\nbuffer.flush()\n"
        "grow(group, version, 20)\nbuffer.save(group.samples)\n"
        "buffer._file.tokens.write_out()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert process.returncode == -signal.SIGKILL
    (file,) = files(tmp_path)
    with file.open("ab") as end:
        end.write(b"rlsg and half of a record")
    size = file.stat().st_size
    back = opened(tmp_path)
    (group,) = back.active()
    assert [list(s.response_ids) for s in group.samples] == [[10, 11, 12]] * 2
    ledger = back.ledger()
    check_ledger(ledger)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        (committed,) = db.execute("SELECT length FROM segments").fetchone()
    assert ledger.torn_bytes == size - committed > 25
    grow(group, back.versions.new(0), 20)
    back.save(group.samples)
    back.close()
    assert len(files(tmp_path)) == 2, "nobody appends to a file that another process began"
    again = opened(tmp_path)
    assert list(again.active()[0].samples[0].response_ids) == [10, 11, 12, 20, 21, 22]
    assert again.ledger().torn_bytes == ledger.torn_bytes, "counted once"
    again.close()


@pytest.mark.parametrize("harm", ["gone", "short"])
def test_a_segment_file_missing_committed_bytes_is_refused(tmp_path: Path, harm: str) -> None:
    buffer = opened(tmp_path)
    group = issue(buffer)
    grow(group, buffer.versions.new(0), 10)
    buffer.save(group.samples)
    buffer.close()
    (file,) = files(tmp_path)
    if harm == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(
        UserError, match=rf"{file.name}: the file .*, expected at least \d+ bytes; restore it"
    ):
        opened(tmp_path)


def test_a_corrupted_byte_is_reported_to_the_reader(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    group = issue(buffer)
    grow(group, buffer.versions.new(0), 10)
    buffer.save(group.samples)
    buffer.close()
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        UserError, match=rf"{file.name} at 0: damaged: checksum mismatch in the record of sample 0"
    ):
        RunReader(tmp_path).groups("1")


def test_a_deposed_launch_writes_into_files_of_its_own_only(tmp_path: Path) -> None:
    deposed_buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 2, claim(tmp_path))
    group, version = issue(deposed_buffer), deposed_buffer.versions.new(0)
    grow(group, version, 10)
    deposed_buffer.save(group.samples)
    deposed_buffer.flush()
    deposed_buffer._file._lock.release()  # as if the two ran on machines that do not see one another's locks
    new = RolloutBuffer(tmp_path / FILE_NAME, "run", 2, claim(tmp_path))
    contents_before = [f.read_bytes() for f in files(tmp_path)]
    grow(new.active()[0], new.versions.new(0), 20)
    new.save(new.active()[0].samples)
    new.flush()
    first, second = files(tmp_path)
    assert first.read_bytes() == contents_before[0] and first.name[:6] < second.name[:6]
    new.close()


def test_a_fenced_launch_deletes_no_file_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prunes, is stopped before the commit, and commits when another launch works on a copy of the ledger."""
    disable_file_locks(monkeypatch)
    first = claim(tmp_path)
    deposed_buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 2, first)
    version = deposed_buffer.versions.new(0)
    group = issue(deposed_buffer)
    grow(group, version, 10, tokens=8)
    for s in group.samples:
        s.status = Status.FINISHED
    deposed_buffer.finish(group, GroupState.READY)
    deposed_buffer.take(1, [group])
    deposed_buffer.flush()
    deposed_buffer._file.tokens._max_bytes = 1  # the next tokens have a file of their own
    later = issue(deposed_buffer)
    grow(later, version, 10)
    deposed_buffer.save(later.samples)
    deposed_buffer.flush()
    deposed_buffer.prune(2)
    writers: list[RolloutBuffer] = []
    run_after_check(
        first,
        lambda: writers.append(RolloutBuffer(tmp_path / FILE_NAME, "run", 2, claim(tmp_path))),
        monkeypatch,
    )
    with pytest.raises(FencedError):
        deposed_buffer.flush()
    (new,) = writers
    new.restore(0)
    _, groups = new.read_step(1)
    assert [len(s.response_ids) for s in new.load(groups[0].samples)] == [8, 8]
    new.close()


def test_a_segment_file_of_dropped_groups_is_deleted_before_any_checkpoint(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    buffer._file.tokens._max_bytes = 1  # a file for each record
    version = buffer.versions.new(0)
    dropped, kept_group = issue(buffer), issue(buffer)
    for group in (dropped, kept_group):
        grow(group, version, 10)
        buffer.save(group.samples)
    buffer.flush()
    files_before = files(tmp_path)
    buffer.finish(dropped, GroupState.EXPIRED)
    grow(kept_group, version, 20)
    buffer.save(kept_group.samples)
    buffer.flush()
    assert [f for f in files_before if f.exists()] == files_before[2:]
    buffer.close()
    back = opened(tmp_path)
    assert [s.tokens for s in back.load(back.active()[0].samples)] == [6, 6]
    assert back.ledger().torn_bytes == 0
    back.close()


def test_a_commit_waits_for_the_files_that_have_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = segments._sync_file

    def noted(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr(segments, "_sync_file", noted)
    buffer = opened(tmp_path)
    group = issue(buffer)
    grow(group, buffer.versions.new(0), 1)
    buffer.save(group.samples)
    buffer.flush()
    assert len(synced) == 1
    buffer.add_lost_tokens(1)
    buffer.flush()
    assert len(synced) == 1, "nothing new lies in it"
    buffer.close()
