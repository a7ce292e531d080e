"""A teacher that is an engine: what it says is kept with the tokens, and one that is away costs samples, not the
run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlsys.algo.no_effect import describe_passes
from rlsys.algo.preflight import check
from rlsys.config import Config, identity, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_vocabulary, read_vocabulary
from rlsys.core.errors import RunError, UserError
from rlsys.core.forks import truncate_sample
from rlsys.core.spans import VersionSpan
from rlsys.core.types import GroupState, Prompt, Sample, SampleGroup, Segment
from rlsys.engine.wire import EngineError
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.samples import SampleQuery
from rlsys.ledger.store import FILE_NAME
from rlsys.planner.memory import budget, model_size
from rlsys.planning import teacher as teacher_module
from rlsys.planning.teacher import UNAVAILABLE, EngineTeacher
from rlsys.rollout.preflight import check_names
from rlsys.segments import teacher_logprobs
from rlsys.segments.records import FOLDER, Kind, SegmentReader, SequenceKey, encode
from rlsys.trainer.pack import TrainSample, pack
from tests.helpers.rollout_rig import Rig, make_config, rig, settle

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "configs" / "algorithms" / "distill.yaml"
TOP_K = 3


def said(prompt: Sequence[int], response: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """That tells the places of prompt and response apart."""
    ids = np.array([[len(prompt) + i, t, 7] for i, t in enumerate(response)], np.int32)
    return ids, (-ids / 100 - 1).astype(np.float32)


class Teacher:
    """In the place of an EngineClient."""

    url = "http://teacher"

    def __init__(self) -> None:
        self.away = False
        self.refusal: str | None = None
        self.status = 400
        self.asked: list[tuple[list[int], list[int]]] = []
        self.failed = 0

    async def most_probable(self, prompt: Sequence[int], response: Sequence[int], top_k: int) -> Any:
        assert top_k == TOP_K
        if self.away:
            self.failed += 1
            raise TimeoutError
        if self.refusal is not None:
            self.failed += 1
            raise EngineError(self.refusal, self.status)
        self.asked.append((list(prompt), list(response)))
        return said(prompt, response)


def teacher_of(client: Teacher, patience: float = 60.0) -> EngineTeacher:
    engine: Any = client
    return EngineTeacher(engine, TOP_K, patience)


def grow(group: SampleGroup, tokens: int = 4) -> None:
    for s in group.samples:
        ids = [10 * s.index + i for i in range(tokens)]
        s.append(Segment(ids, [-0.5] * tokens, [VersionSpan(1, 0, tokens)], None))


def teach(sample: Sample) -> bytes:
    sample.teacher_logprobs = teacher_logprobs.encode(*said(sample.prompt_ids, sample.response_ids))
    sample.taught = True
    return sample.teacher_logprobs


def opened(folder: Path) -> RolloutBuffer:
    return RolloutBuffer(folder / FILE_NAME, "run", 2)


def issue(buffer: RolloutBuffer) -> SampleGroup:
    return buffer.issue(Prompt(0, "", [1, 2], {}), [5, 6])


# -- the bytes ----------------------------------------------------------------------------------------------


def test_teacher_log_probs_round_trip_through_their_encoding() -> None:
    ids, logp = said([1, 2], [5, 6, 7, 8, 9])
    result = teacher_logprobs.decode(teacher_logprobs.encode(ids, logp), 5)
    assert np.array_equal(result[0], ids) and np.array_equal(result[1], logp)


@pytest.mark.parametrize(
    ("ids", "logp", "told"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), "expected"),
        (np.zeros(3), np.zeros(3), "expected"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "expected"),
        (np.zeros((1, 2)), np.array([[0.0, np.nan]]), "not finite"),
        (np.zeros((1, 2)), np.array([[0.0, -np.inf]]), "not finite"),
    ],
)
def test_invalid_teacher_log_probs_are_refused(ids: Any, logp: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        teacher_logprobs.encode(ids, logp)


def test_opinions_of_another_number_of_tokens_are_refused() -> None:
    encoded_logprobs = teacher_logprobs.encode(*said([1], [5, 6, 7, 8, 9]))
    for tokens, data in ((4, encoded_logprobs), (5, encoded_logprobs[:-1]), (5, b"")):
        with pytest.raises(ValueError, match="bytes of teacher log-probs"):
            teacher_logprobs.decode(data, tokens)


# -- the ledger ---------------------------------------------------------------------------------------------


def test_teacher_log_probs_are_stored_with_the_tokens(tmp_path: Path) -> None:
    """Of a sample that was asked about after its tokens were saved, and of one that was not; also by a reopened
    file, which does not write them again."""
    buffer = opened(tmp_path)
    group = issue(buffer)
    grow(group)
    buffer.save(group.samples)
    encoded_logprobs = teach(group.samples[0])
    buffer.save(group.samples)
    buffer.flush()
    buffer.close()
    buffer = opened(tmp_path)
    again = buffer.groups[group.group_id].samples
    assert [(s.taught, s.teacher_logprobs) for s in again] == [(True, b""), (False, b"")], (
        "held on disk alone"
    )
    size = sum(f.stat().st_size for f in (tmp_path / FOLDER).iterdir())
    buffer.save(again)
    buffer.flush()
    assert sum(f.stat().st_size for f in (tmp_path / FOLDER).iterdir()) == size
    (stored_group,) = buffer.read_groups([group.group_id])
    with SegmentReader(tmp_path) as segments:
        assert [bytes(segments.arrays(s).teacher_logprobs) for s in stored_group.samples] == [
            encoded_logprobs,
            b"",
        ]
    buffer.close()


def test_a_response_that_is_cut_loses_them(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    group = issue(buffer)
    grow(group)
    for sample in group.samples:
        teach(sample)
    buffer.save(group.samples)
    truncate_sample(group.samples[0], 2)
    assert not group.samples[0].taught
    buffer.save(group.samples)
    group.samples[0].append(Segment([8], [-0.5], [VersionSpan(1, 0, 1)], None))
    buffer.save(group.samples)
    encoded_logprobs = teach(group.samples[0])
    buffer.save(group.samples)
    buffer.flush()
    buffer.close()
    buffer = opened(tmp_path)
    first = buffer.groups[group.group_id].samples[0]
    assert first.tokens == 3 and first.taught
    (stored_group,) = buffer.read_groups([group.group_id])
    with SegmentReader(tmp_path) as segments:
        assert bytes(segments.arrays(stored_group.samples[0]).teacher_logprobs) == encoded_logprobs
    buffer.close()


def test_a_corrupted_byte_of_teacher_log_probs_is_detected(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    group = issue(buffer)
    grow(group)
    buffer.save(group.samples)
    encoded_logprobs = teach(group.samples[0])
    buffer.save(group.samples)
    buffer.flush()
    (stored_group,) = buffer.read_groups([group.group_id])
    (file,) = (tmp_path / FOLDER).iterdir()
    data = bytearray(file.read_bytes())
    data[data.index(encoded_logprobs) + 5] ^= 1
    file.write_bytes(data)
    with SegmentReader(tmp_path) as segments, pytest.raises(RunError, match="damaged"):
        segments.arrays(stored_group.samples[0])
    buffer.close()


def test_teacher_log_probs_of_a_partial_response_are_rejected(tmp_path: Path) -> None:
    """A teacher is asked about whole responses: a shorter record would be of another response."""
    buffer = opened(tmp_path)
    group = issue(buffer)
    grow(group)
    buffer.save(group.samples)
    buffer.flush()
    (stored_group,) = buffer.read_groups([group.group_id])
    sample = stored_group.samples[0]
    record = encode(
        Kind.TEACHER_LOGPROBS, SequenceKey.of(sample), 0, 3, teacher_logprobs.encode(*said([1, 2], [0, 1, 2]))
    )
    (file,) = (tmp_path / FOLDER).iterdir()
    offset = file.stat().st_size
    with file.open("ab") as f:
        f.write(record)
    sample.pieces.append(type(sample.pieces[0])(file.name, offset, len(record)))
    with (
        SegmentReader(tmp_path) as segments,
        pytest.raises(RunError, match="teacher log-probs of 3 tokens; expected 4"),
    ):
        segments.arrays(sample)
    buffer.close()


async def go_on(r: Rig) -> None:
    await settle()
    r.router.tick()


# -- asking -------------------------------------------------------------------------------------------------


async def test_the_teacher_scores_each_response_once_for_training(tmp_path: Path) -> None:
    client = Teacher()
    async with rig(make_config(tmp_path), teacher=teacher_of(client)) as r:
        await r.start()
        batch = await r.take(1)
        for sample in (s for g in batch.groups for s in g.samples):
            ids, logp = teacher_logprobs.decode(sample.teacher_logprobs, sample.tokens)
            expected = said(sample.prompt_ids, sample.response_ids)
            assert np.array_equal(ids, expected[0]) and np.array_equal(logp, expected[1])
        assert len(client.asked) == 4
        assert (batch.metrics["teacher_tokens"], batch.metrics["teacher_unanswered"]) == (12, 0)
        await r.push()
        await r.take(2)
        await r.manager.commit(2)
        r.buffer.prune(2)
        r.buffer.flush()
        pruned_groups = r.buffer.read_groups([g.group_id for g in batch.groups])
        assert not any(s.pieces for g in pruned_groups for s in g.samples), "pruned with the tokens"


async def test_a_restarted_run_does_not_query_the_teacher_again(tmp_path: Path) -> None:
    """It ended when the teacher had answered and the reward had not."""

    async def nobody_answers(prompt: Prompt, text: str) -> float:
        await asyncio.Event().wait()
        return 0.0

    client, again = Teacher(), Teacher()
    config = make_config(tmp_path)
    async with rig(config, reward=nobody_answers, teacher=teacher_of(client)) as r:
        await r.start()
        task = asyncio.create_task(r.manager.take(1))
        while len(client.asked) < 4:
            await go_on(r)
        await go_on(r)
        task.cancel()
    async with rig(config, teacher=teacher_of(again)) as r:
        await r.start()
        batch = await r.take(1)
        assert again.asked == []
        for sample in (s for g in batch.groups for s in g.samples):
            assert sample.teacher_logprobs == teacher_logprobs.encode(
                *said(sample.prompt_ids, sample.response_ids)
            )


async def test_a_dead_teacher_censors_samples_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more groups in a row than would stop a run for any other reason; when it is back, samples are scored."""
    monkeypatch.setattr(teacher_module, "RETRY_SECONDS", 0.0)
    client = Teacher()
    client.away, back_at = True, 12
    config = make_config(tmp_path)
    async with rig(config, teacher=teacher_of(client, patience=0.0)) as r:
        await r.start()
        task = asyncio.create_task(r.manager.take(1))
        while not task.done():
            client.away = r.buffer.counts[GroupState.CENSORED] < back_at
            await go_on(r)
        batch = task.result()
        assert batch is not None and len(batch.groups) == 2
        assert batch.metrics["censored"] >= back_at > 2 * config.rollout.groups_per_step
        assert batch.metrics["teacher_unanswered"] >= back_at
        assert batch.metrics["lost"] == 0
        reasons = {
            s.sample.censor_reason for s in r.manager.samples(SampleQuery(status="censored", limit=100))
        }
        assert {reason and reason.partition(":")[0] for reason in reasons} == {UNAVAILABLE}


async def test_a_teacher_that_returns_in_time_censors_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once that it is away, and once that it is back."""
    monkeypatch.setattr(teacher_module, "RETRY_SECONDS", 0.0)
    client = Teacher()
    client.away = True
    async with rig(make_config(tmp_path), teacher=teacher_of(client)) as r:
        await r.start()
        task = asyncio.create_task(r.manager.take(1))
        while not task.done():
            client.away = client.failed < 20
            await go_on(r)
        batch = task.result()
        assert batch is not None and batch.metrics["censored"] == 0
        assert batch.metrics["teacher_unanswered"] == 0
    messages = [r.getMessage() for r in caplog.records if r.name == "rlsys.rollout"]
    assert [t.partition(client.url)[2] for t in messages if client.url in t] == [
        " does not answer: TimeoutError",
        " answers again",
    ]


async def test_a_servers_own_fault_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies may answer with an error first."""
    monkeypatch.setattr(teacher_module, "RETRY_SECONDS", 0.0)
    client = Teacher()
    client.refusal, client.status = "out of memory", 500
    async with rig(make_config(tmp_path), teacher=teacher_of(client)) as r:
        await r.start()
        task = asyncio.create_task(r.manager.take(1))
        while not task.done():
            client.refusal = client.refusal if client.failed < 20 else None
            await go_on(r)
        batch = task.result()
        assert batch is not None and batch.metrics["censored"] == 0


async def test_a_teacher_that_refuses_stops_the_run(tmp_path: Path) -> None:
    """It would refuse the next ones as well."""
    client = Teacher()
    client.refusal = "the prompt is too long"
    async with rig(make_config(tmp_path), teacher=teacher_of(client)) as r:
        await r.start()
        with pytest.raises(
            RunError, match=r"4 groups could not be used.* algo.teacher: the prompt is too long"
        ):
            await r.take(1)


# -- training -----------------------------------------------------------------------------------------------


def taught(row: int, prompt: list[int], response: list[int]) -> TrainSample:
    n = len(response)
    encoded_logprobs = teacher_logprobs.encode(*said(prompt, response))
    return TrainSample(prompt, response, [-0.5] * n, [1] * n, row, teacher_logprobs=encoded_logprobs)


def test_they_are_packed_at_their_tokens() -> None:
    samples = [taught(0, [1, 2, 3], [5, 6]), taught(1, [4], [7, 8, 9])]
    (micro,) = pack(samples, 100)
    assert micro.teacher_ids is not None and micro.teacher_logp is not None
    assert micro.teacher_ids.shape == micro.teacher_logp.shape == (9, TOP_K)
    starts = micro.cu_seqlens.tolist()
    for index, row in enumerate(micro.rows.tolist()):
        s = samples[row]
        ids, logp = said(s.prompt_ids, list(s.response_ids))
        first, last = starts[index] + len(s.prompt_ids), starts[index + 1]
        assert torch.equal(micro.teacher_ids[first:last], torch.from_numpy(ids.astype(np.int64)))
        assert torch.equal(micro.teacher_logp[first:last], torch.from_numpy(logp))
        assert not micro.teacher_ids[starts[index] : first].any()


def test_unfinished_samples_are_packed_without() -> None:
    """They are scored by the weights that sampled them, before a teacher is asked."""
    bare = TrainSample([1], [2, 3], [-0.5] * 2, [1] * 2, 1)
    (micro,) = pack([taught(0, [1], [5, 6]), bare], 100)
    assert micro.teacher_ids is None and micro.teacher_logp is None


def test_two_widths_in_one_step_are_refused() -> None:
    narrow_sample = TrainSample(
        [1],
        [2],
        [-0.5],
        [1],
        1,
        teacher_logprobs=teacher_logprobs.encode(np.zeros((1, 2), np.int32), -np.ones((1, 2), "f4")),
    )
    with pytest.raises(
        RunError, match="teacher log-probs have 2 ids per token in some samples and 3 in others"
    ):
        pack([taught(0, [1], [5, 6]), narrow_sample], 100)


# -- the config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.workers=2", "engine.count=2"], r"but rollout.workers = 2: .* use 1"),
        (["rollout.temperature=0.8"], r"but rollout.temperature = 0.8: .* use 1"),
        (["rollout.top_k=20"], r"but rollout.top_k = 20: .* use null"),
        (["algo.teacher.top_k=null"], r"but algo.teacher.top_k = null: .* use a number"),
        (
            ["algo.teacher.by_source={code: configs/models/quickstart-moe}"],
            r"but algo.teacher.by_source names",
        ),
        (["algo.loss=[clip]"], r"is unused: .* add distill"),
    ],
)
def test_unsupported_configs_of_a_teacher_engine_are_refused(overrides: list[str], told: str) -> None:
    config = load_config(RECIPE, ["algo.teacher.engine=own", *overrides])
    with pytest.raises(UserError, match=told):
        check(config)


@pytest.mark.parametrize(
    ("url", "told"),
    [("http://user:secret@host:1", "a user name or a password"), ("http://:80", "expected a URL")],
)
def test_invalid_teacher_engine_urls_are_refused(url: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_names(load_config(RECIPE, [f"algo.teacher.engine={url}"]))


def test_the_trainer_holds_none_and_makes_no_pass() -> None:
    trainer_config, engine_config = (
        load_config(RECIPE, [f"algo.teacher.engine={e}"]) for e in ("null", "own")
    )
    check(engine_config)
    size = model_size(HFConfig.read(engine_config.model.path))
    assert budget(trainer_config, size).weights == 2 * budget(engine_config, size).weights
    assert "none of the teacher: an engine scores each response" in describe_passes(engine_config)
    assert "the whole step with the teacher" in describe_passes(trainer_config)


def test_the_run_identity_ignores_the_address_of_the_teacher_engine() -> None:
    def of(engine: str) -> Config:
        return load_config(RECIPE, [f"algo.teacher.engine={engine}"])

    assert identity(of("own")) == identity(of("http://a:1")) != identity(of("null"))
    assert identity(of("null")) == identity(load_config(RECIPE))


def test_only_its_vocabulary_has_to_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nobody"], "vocab_size": 7}')
    config = load_config(RECIPE, [f"algo.teacher.path={tmp_path}", "algo.teacher.engine=own"])
    hf = HFConfig.read(config.model.path)
    check_vocabulary(config, hf, hf.vocab_size, tmp_path)
    with pytest.raises(UserError, match=r"algo.teacher.path = .* its vocabulary has 7 tokens; expected 128"):
        check_vocabulary(config, hf, read_vocabulary(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json: cannot read vocab_size"):
        read_vocabulary(tmp_path)
