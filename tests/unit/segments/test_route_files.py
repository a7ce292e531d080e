"""Routes out of band: what an engine wrote is read, each stage its own layers; what nobody claimed is absent and
counted; files go when nobody wants them; batches are those that answers with the routes in them would make."""

from __future__ import annotations

import base64
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.core.errors import RunError, UserError
from rlsys.core.owner import claim
from rlsys.core.spans import RouteLocation, RouteSpan, VersionSpan
from rlsys.core.types import GroupState, Prompt, Sample, SampleGroup, Segment, Status
from rlsys.engine.chunks import Meta, WeightSpan
from rlsys.engine.chunks import read_routes as from_answer
from rlsys.engine.hooks.route_writer import RouteWriter, route_writer
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.route_files import RouteFiles
from rlsys.ledger.store import FILE_NAME
from rlsys.segments.records import FOLDER, SegmentReader
from rlsys.segments.route_records import (
    ROUTES_VARIABLE,
    RouteFile,
    encode,
    load_with_routes,
    pointer,
    read_pointer,
    read_routes,
)
from rlsys.trainer.model.routing import decode
from rlsys.trainer.pack import LazySample, pack
from tests.helpers.route_cases import LAYERS, TOPK, chosen, writer

ROOT = Path(__file__).resolve().parents[3]


def opened(folder: Path) -> RolloutBuffer:
    return RolloutBuffer(folder / FILE_NAME, "run", 2)


def meta(said: bytes, *spans: tuple[int, int]) -> Meta:
    """What an engine says at the end of a request. `spans`: of weight versions 1, 2, ..."""
    versions = [WeightSpan(str(i), a, b) for i, (a, b) in enumerate(spans, 1)]
    return Meta(routed_experts=base64.b64encode(said).decode(), weight_versions=versions)


def answered(made: RouteWriter | None, sample: Sample, tokens: int, version: int) -> None:
    """The engine adds tokens to the sample, with routes from the seam on: in a file, or in its answer."""
    have = len(sample.prompt_ids) + len(sample.response_ids)
    first = have - 1 if sample.response_ids else 0
    experts = chosen(have + tokens - 1 - first)
    encoded_routes = experts.tobytes() if made is None else made.append(experts, first)
    routes = from_answer(meta(encoded_routes), have, tokens, first)
    ids = list(range(3, 3 + tokens))
    spans = [VersionSpan(version, 0, tokens)]
    sample.append(Segment(ids, [-i / 7 for i in ids], spans, "abort", routes=routes))


def issue(buffer: RolloutBuffer) -> SampleGroup:
    return buffer.issue(Prompt(0, "", [1, 2], {}), [5, 6])


def names(folder: Path) -> list[str]:
    return sorted(f.relative_to(folder / FOLDER).as_posix() for f in (folder / FOLDER).glob("*/*"))


def trained(buffer: RolloutBuffer, group: SampleGroup, step: int) -> list[Sample]:
    for s in group.samples:
        s.status = Status.FINISHED
    buffer.finish(group, GroupState.READY)
    buffer.take(step, [group])
    (back,) = buffer.read_step(step)[1]
    buffer.flush()
    return back.samples


# -- records --------------------------------------------------------------------------------------------------------


@given(st.data())
def test_each_stage_reads_its_own_layers_and_no_others(data: st.DataObject) -> None:
    rows, layers, topk = (data.draw(st.integers(1, 6)) for _ in range(3))
    most = data.draw(st.sampled_from([3, 256, 257, 60_000]))
    seed, start = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 100))
    experts = np.random.default_rng(seed).integers(0, most, (rows, layers, topk)).astype(np.int32)
    record = encode(experts, start)
    location = read_pointer(pointer("000001-engine-0-1/0-000001.seg", 11, record), start, rows)
    assert location is not None and location.length == len(record)
    stage_layers = sorted(data.draw(st.sets(st.integers(0, layers - 1), min_size=1)))
    skip = data.draw(st.integers(0, rows - 1))
    span = RouteSpan(start + skip, start + rows, b"", location)
    read: list[int] = []

    def at(segment: str, offset: int, length: int) -> bytes:
        read.append(length)
        return (bytes(11) + record)[offset : offset + length]

    stage_routes = read_routes(at, span, stage_layers)
    assert (stage_routes.experts == experts[skip:, stage_layers].transpose(1, 0, 2)).all()
    width = 1 if experts.max() < 256 else 2
    assert sum(read) == 44 + 8 + 4 * layers + len(stage_layers) * rows * topk * width
    assert (read_routes(at, span, None).experts.transpose(1, 0, 2) == experts[skip:]).all()


@given(st.data())
def test_no_changed_byte_passes(data: st.DataObject) -> None:
    record = bytearray(encode(chosen(3), 4))
    location = read_pointer(pointer("000001-engine-0-1/0-000001.seg", 0, bytes(record)), 4, 3)
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RunError, match=r"0-000001.seg at 0"):
        read_routes(lambda _, o, n: bytes(record[o : o + n]), RouteSpan(4, 7, b"", location), None)


@pytest.mark.parametrize(
    "name",
    [
        "../x.seg", "/etc/passwd", "000001-e-1/../1-000001.seg", "a/b", "", f"000001-{'e' * 300}-1/0-000001.seg",
        f"000001-e-{'1' * 300}/0-000001.seg", f"000001-e-1/{'1' * 300}-000001.seg",
    ],
)  # fmt: skip
def test_an_answer_points_nowhere_else(name: str) -> None:
    assert RouteFile.of(name) is None
    with pytest.raises(ValueError, match="a pointer names the file"):
        read_pointer(pointer(name, 0, encode(chosen(3), 0)), 0, 3)


def test_a_pointer_must_be_of_this_request() -> None:
    route_pointer = pointer("000001-engine-0-1/0-000001.seg", 0, encode(chosen(3), 4))
    with pytest.raises(ValueError, match=r"routes of 3 positions from 4 on; expected 5 from 2 on"):
        read_pointer(route_pointer, 2, 5)
    assert read_pointer(chosen(3).tobytes(), 4, 3) is None, "the stock answer"


def test_an_engine_writes_only_where_its_run_is(tmp_path: Path) -> None:
    unit = str(tmp_path / FOLDER / "engine-3")
    assert route_writer(0, {}) is None
    owner = claim(tmp_path)
    env = {ROUTES_VARIABLE: unit, **owner.environment(2)}
    engine_writer = route_writer(1, env)
    assert engine_writer is not None
    engine_writer.append(chosen(2), 0)
    assert names(tmp_path) == [f"{owner.epoch:06d}-engine-3-2/1-000001.seg"]
    other_folder = tmp_path / "another-machine"
    other_folder.mkdir()
    assert route_writer(1, env | {ROUTES_VARIABLE: str(other_folder / FOLDER / "engine-3")}) is None


# -- the ledger -----------------------------------------------------------------------------------------------------


def test_batches_are_those_of_routes_in_the_answers(tmp_path: Path) -> None:
    """Interrupted, resumed, stale; read whole, and by stages."""
    packed = []
    for way in (None, writer(tmp_path)):
        folder = tmp_path / ("answers" if way is None else "files")
        folder.mkdir()
        if way is not None:
            way = writer(folder)
        buffer = opened(folder)
        group, version = issue(buffer), buffer.versions.new(0)
        for tokens in (4, 3):
            for s in group.samples:
                answered(way, s, tokens, version)
            buffer.save(group.samples)
        seamed = from_answer_after_push(way, group.samples[1], buffer.versions.new(0))
        assert seamed.end - seamed.start == 2, "older routes left with the first pass"
        samples = trained(buffer, group, 1)
        with SegmentReader(folder) as reader:
            for layers in (None, [0, 1, 2], [3, 4]):
                (micro,) = pack([LazySample(s, i, reader, layers) for i, s in enumerate(samples)], 100)
                packed.append(
                    decode(micro.routes, len(micro.tokens), LAYERS, TOPK, layers).numpy().tobytes()
                    + micro.tokens.numpy().tobytes()
                    + micro.mu.numpy().tobytes()
                )
            assert pack([LazySample(samples[0], 0, reader, [])], 100)[0].routes == [], (
                "without replay none is read"
            )
        buffer.close()
    assert packed[:3] == packed[3:]


def from_answer_after_push(made: RouteWriter | None, sample: Sample, version: int) -> RouteSpan:
    """The weights change under a request that makes 3 tokens."""
    have = len(sample.prompt_ids) + len(sample.response_ids)
    first = have - 1
    experts = chosen(3)
    encoded_routes = experts.tobytes() if made is None else made.append(experts, first)
    routes = from_answer(meta(encoded_routes, (0, 1), (1, 3)), have, 3, first)
    assert routes is not None
    spans = [VersionSpan(version, 0, 3)]
    sample.append(Segment([7, 8, 9], [-1.0, -2.0, -3.0], spans, "stop", routes=routes))
    return routes


def test_loaded_routes_do_not_depend_on_their_files(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    group = issue(buffer)
    for s in group.samples:
        answered(writer(tmp_path, start=s.index + 1), s, 4, buffer.versions.new(0))
    samples = trained(buffer, group, 1)
    with SegmentReader(tmp_path) as reader:
        loaded_samples = [load_with_routes(reader, s) for s in samples]
        assert all(s.routes[0].location is not None for s in map(reader.load, samples))
    assert [s.routes for s in loaded_samples] == [[RouteSpan(0, 5, chosen(5).astype("<u2").tobytes())]] * 2
    buffer.close()


def test_a_restart_finds_them_and_reads_none(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    group, version = issue(buffer), buffer.versions.new(0)
    for s in group.samples:
        answered(writer(tmp_path, start=s.index + 1), s, 4, version)
    buffer.save(group.samples)
    buffer.close()
    back = opened(tmp_path)
    assert [s.routes for s in back.active()[0].samples] == [s.routes for s in group.samples]
    assert isinstance(back.active()[0].samples[0].routes[0].location, RouteLocation)
    back.close()
    file = tmp_path / FOLDER / names(tmp_path)[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        UserError, match=rf"{file.name}: the file has \d+ bytes, expected at least \d+ bytes; restore it"
    ):
        opened(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"the file is missing, expected at least \d+ bytes; restore it"):
        opened(tmp_path)


def test_routes_whose_file_is_missing_are_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A late answer of an engine that has been started again since, or a disk that lost the file."""
    buffer = opened(tmp_path)
    group, version = issue(buffer), buffer.versions.new(0)
    for s in group.samples:
        answered(writer(tmp_path, start=s.index + 1), s, 4, version)
    (tmp_path / FOLDER / names(tmp_path)[0]).unlink()
    buffer.save(group.samples)
    assert [len(s.routes) for s in group.samples] == [0, 1]
    assert "sample 0: no routed experts for positions 0 to 4" in caplog.text
    buffer.close()
    back = opened(tmp_path)
    assert [len(s.routes) for s in back.active()[0].samples] == [0, 1]
    back.close()


def test_a_route_file_is_removed_when_unused_and_no_longer_written(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    version, engine_writer = buffer.versions.new(0), writer(tmp_path, size=1)  # a file for each record
    late = issue(buffer)
    answered(engine_writer, late.samples[0], 4, version)
    buffer.save(late.samples)
    engine_writer.append(chosen(3), 0)  # an answer that nobody heard
    for step in (1, 2):
        group = issue(buffer)
        for s in group.samples:
            answered(engine_writer, s, 4, version)
        trained(buffer, group, step)
    files_before = names(tmp_path)
    buffer.prune(2)
    assert names(tmp_path) == files_before, "before the commit a restart could want them"
    buffer.flush()
    assert names(tmp_path) == [files_before[0], *files_before[-2:]], (
        "the late sample's, and what may still be written"
    )
    assert buffer.ledger().torn_bytes == len(encode(chosen(3), 0))
    check_ledger(buffer.ledger())
    answered(writer(tmp_path, start=2), late.samples[1], 4, version)
    buffer.save(late.samples)
    group = issue(buffer)
    trained_now = trained(buffer, group_with_tokens(group, version), 3)
    buffer.prune(3)
    buffer.flush()
    assert names(tmp_path) == [files_before[0], "000000-engine-0-2/0-000001.seg"], (
        "the engine was started again"
    )
    assert len(trained_now) == 2
    buffer.finish(late, GroupState.EXPIRED)
    buffer.flush()
    buffer.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        assert db.execute("SELECT count(*) FROM route_places").fetchone() == (0,)


def group_with_tokens(group: SampleGroup, version: int) -> SampleGroup:
    for s in group.samples:
        s.append(Segment([3], [-1.0], [VersionSpan(version, 0, 1)], "stop"))
    return group


def test_an_engine_killed_inside_a_segment(tmp_path: Path) -> None:
    """What was acknowledged is there, what was not is absent and counted."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from tests.helpers.route_cases import chosen, writer\n"
        "made = writer(Path(sys.argv[1]))\n"
        "sys.stdout.buffer.write(made.append(chosen(5), 0))\nsys.stdout.flush()\n"
        "made.append(chosen(9), 0)\nos.write(made._fd, b'rlsg and half of a record')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.returncode == -signal.SIGKILL
    buffer = opened(tmp_path)
    group, version = issue(buffer), buffer.versions.new(0)
    routes = from_answer(meta(process.stdout), 2, 4, 0)
    assert routes is not None
    group.samples[0].append(
        Segment([3] * 4, [-1.0] * 4, [VersionSpan(version, 0, 4)], "abort", routes=routes)
    )
    group.samples[1].append(Segment([3], [-1.0], [VersionSpan(version, 0, 1)], "abort"))
    samples = trained(buffer, group, 1)
    with SegmentReader(tmp_path) as reader:
        loaded_sample = load_with_routes(reader, samples[0])
    assert np.frombuffer(loaded_sample.routes[0].experts, "<u2").tolist() == chosen(5).flatten().tolist()
    writer(tmp_path, start=2).append(chosen(1), 0)  # it has been started again
    buffer.prune(1)
    buffer.flush()
    assert names(tmp_path) == ["000000-engine-0-2/0-000001.seg"]
    ledger = buffer.ledger()
    check_ledger(ledger)
    assert (ledger.torn_bytes, ledger.lost_tokens) == (len(encode(chosen(9), 0)) + 25, 0)
    buffer.close()


@pytest.mark.parametrize("started", [-2, 5])
def test_weights_that_changed_outside_of_a_request_are_its_engines_fault(started: int) -> None:
    """4 tokens after a prompt of 2; before, experts of other positions would have been taken for theirs."""
    encoded_routes = chosen(5).tobytes()
    with pytest.raises(ValueError, match="weights changed at position"):
        from_answer(meta(encoded_routes, (0, 1), (started, 4)), 2, 4, 0)
    assert from_answer(meta(encoded_routes, (0, 4), (4, 4)), 2, 4, 0) is None, (
        "nothing was predicted by the new ones"
    )


def test_a_full_disk_leaves_neither_empty_files_nor_parts_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_writer, write, free_bytes = writer(tmp_path), os.write, [100]

    def until_full(fd: int, data: bytes) -> int:
        if not free_bytes[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        byte_count = write(fd, memoryview(data)[: free_bytes[0]])
        free_bytes[0] -= byte_count
        return byte_count

    monkeypatch.setattr(os, "write", until_full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            engine_writer.append(chosen(9), 0)
    assert names(tmp_path) == []
    free_bytes[0] = len(encode(chosen(3), 0)) + 7
    engine_writer.append(chosen(3), 0)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            engine_writer.append(chosen(9), 0)
    (only,) = names(tmp_path)
    assert (tmp_path / FOLDER / only).stat().st_size == len(encode(chosen(3), 0)), "what was acknowledged"


def test_a_kill_before_file_removal_counts_no_bytes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = opened(tmp_path)
    version, engine_writer = buffer.versions.new(0), writer(tmp_path, size=1)
    engine_writer.append(chosen(3), 0)  # an answer that nobody heard
    for step in (1, 2):
        group = issue(buffer)
        for s in group.samples:
            answered(engine_writer, s, 4, version)
        trained(buffer, group, step)
    monkeypatch.setattr(RouteFiles, "remove_unused", lambda _: None)  # the kill
    buffer.prune(2)
    buffer.flush()
    torn = buffer.ledger().torn_bytes
    buffer.close()
    monkeypatch.undo()
    files_before = names(tmp_path)
    back = opened(tmp_path)
    assert names(tmp_path) == files_before[-2:], "what may still be written"
    trained(back, group_with_tokens(issue(back), version), 3)
    back.prune(3)
    back.flush()
    assert back.ledger().torn_bytes == torn == len(encode(chosen(3), 0))
    back.close()


def test_more_than_a_record_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB; a kernel reads 2 GiB at once."""
    monkeypatch.setattr("rlsys.segments.route_records.MAX_PAYLOAD_BYTES", 50)
    with pytest.raises(ValueError, match="expected at most 50"):
        encode(chosen(3), 0)


def test_a_record_is_read_in_as_many_calls_as_the_kernel_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 7), at))
    read_pointer(writer(tmp_path).append(chosen(5), 0), 0, 5)
    (name,) = names(tmp_path)
    with SegmentReader(tmp_path) as reader:
        assert reader.bytes_at(name, 0, 10**6) == encode(chosen(5), 0)
