"""Samples of several sequences: in the ledger, in an agent's run that is interrupted anywhere, in a step's table."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algo.batch import Samples
from rlsys.core.spans import RouteSpan, VersionSpan
from rlsys.core.types import GroupState, LogProbResult, Prompt, Sample, SampleGroup, Segment, Status
from rlsys.generators.generator import build_generator
from rlsys.generators.tools import ToolFailed
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.ledger.samples import SampleQuery
from rlsys.ledger.store import FILE_NAME
from rlsys.segments.records import SegmentReader
from rlsys.trainer.pack import TrainSample, pack
from rlsys.viewer.reading import sequences_of
from tests.helpers.episode_cases import split_groups
from tests.unit.generators.test_agent import TOKENIZER, Model, config, fresh, prompt

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "sample", "observe", "save", "flush", "reopen"]),
        st.integers(0, 1),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    max_size=25,
)


def arrays(s: Sample) -> list[object]:
    """What must come back of each sequence."""
    return [
        (
            q.sequence, q.parent, q.aside, q.last_turn, q.seed, q.prompt_ids, list(q.response_ids), list(q.mu),
            q.spans, q.observed, q.routes, q.status,
        )
        for q in s.sequences
    ]  # fmt: skip


@pytest.mark.gate
@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_the_ledger_has_every_sequence_as_it_was_saved(steps: Sequence[tuple[str, int, int, int]]) -> None:
    """Any order of conversations that begin and grow, saves and restarts; what was not committed is made again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        buffer = RolloutBuffer(folder / FILE_NAME, "run", 4)
        version = buffer.versions.new(0)
        group = buffer.issue(Prompt(0, "", [1, 2], {}), [5, 6])
        buffer.flush()
        sampled = 0
        for operation, sample_index, index, tokens in steps:
            sample = group.samples[sample_index]
            if operation == "begin":
                sample.begin([7] * tokens, parent=index % (1 + len(sample.extra_sequences)), aside=index == 3)
            elif operation in ("sample", "observe"):
                q = sample.sequences[index % (1 + len(sample.extra_sequences))]
                if operation == "sample":
                    sampled += tokens
                    grow(q, version, tokens)
                    q.last_turn = sampled
                elif q.tokens:
                    q.observe([3] * tokens)
            elif operation == "save":
                buffer.save([sample])
                assert not buffer.unsaved(sample)
            else:
                buffer.save(group.samples)
                buffer.flush()
                arrays_before = [arrays(s) for s in group.samples]
                assert [arrays(s) for s in RunReader(folder).groups("1")[0].samples] == arrays_before
                ledger = buffer.ledger()
                check_ledger(ledger)
                assert ledger.tokens["active"] == sum(s.all_tokens for s in group.samples)
                if operation == "reopen":
                    buffer.close()
                    buffer = RolloutBuffer(folder / FILE_NAME, "run", 4)
                    (group,) = buffer.active()
                    assert [arrays(s) for s in group.samples] == arrays_before
                    sampled = 0
                assert buffer.added_tokens == sampled
        buffer.close()


def grow(q: Sample, version: int, tokens: int) -> None:
    start, routed_end = q.tokens, q.routes[-1].end if q.routes else 0
    q.append(Segment(range(start, start + tokens), [-0.1] * tokens, [VersionSpan(version, 0, tokens)]))
    last = len(q.prompt_ids) + q.tokens - 1
    if last > routed_end:
        q.routes.append(RouteSpan(routed_end, last, bytes(last - routed_end)))


def episode(sample_id: int = 0, version: int = 1) -> Sample:
    """Five tokens, of which the third is observed; two in a second conversation; four on the side."""
    s = Sample(sample_id, 0, sample_id, [1, 2], seed=5)
    s.append(Segment([10, 11], [-0.1, -0.2], [VersionSpan(version, 0, 2)]))
    s.observe([3])
    s.append(Segment([12, 13], [-0.3, -0.4], [VersionSpan(version, 0, 2)]))
    for ids, aside in (([20, 21], False), ([30, 31, 32, 33], True)):
        q = s.begin([7, 8, 9], aside=aside)
        q.append(Segment(ids, [-0.5] * len(ids), [VersionSpan(version + 1, 0, len(ids))]))
    return s


def test_a_table_counts_samples_and_their_trained_tokens_whatever_their_sequences() -> None:
    split, plain = episode(), Sample(1, 0, 1, [1, 2], seed=6)
    plain.append(Segment([4] * 3, [-1.0] * 3, [VersionSpan(1, 0, 3)]))
    split.reward, plain.reward = 1.0, 0.0
    table = Samples.of([SampleGroup(0, 0, [split, plain])])
    assert table.lengths.tolist() == [6, 3], (
        "four of the first conversation, two of the second, none on the side"
    )
    assert table.log_likelihood is not None
    assert table.log_likelihood.tolist() == pytest.approx([-2.0 / 6, -1.0])
    assert split.all_tokens == 11 and split.oldest_version == 1
    packed = [TrainSample.of(q, row) for row, s in enumerate([split, plain]) for q in s.trained_sequences]
    (batch,) = pack(packed, 64)
    assert int(batch.mask.sum()) == 9
    assert sorted(zip(batch.rows.tolist(), batch.sequence_index, strict=True)) == [(0, 0), (0, 1), (1, 0)]


def test_judged_ids_cover_all_conversations_with_the_latest_turn_last() -> None:
    s = episode()
    s.last_turn, s.extra_sequences[0].last_turn = 3, 2
    assert list(s.judged_ids) == [20, 21, 10, 11, 3, 12, 13]
    s.extra_sequences[0].last_turn = 4
    assert list(s.judged_ids) == [10, 11, 3, 12, 13, 20, 21]


def test_scores_and_interrupts_are_of_one_sequence(tmp_path: Path) -> None:
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 4)
    version = buffer.versions.new(0)
    group = buffer.issue(Prompt(0, "", [1, 2], {}), [5])
    (s,) = group.samples
    grow(s, version, 3)
    grow(s.begin([4]), version, 2)
    buffer.save([s])
    buffer.store_scores([LogProbResult(s.sample_id, 0, [-0.25, -0.5], sequence=1)])
    buffer.replay_log.record_interrupts(s.sequences)
    s.status = Status.FINISHED
    buffer.finish(group, GroupState.READY)
    buffer.take(1, [group])
    (back,) = buffer.load(buffer.read_step(1)[1][0].samples)
    assert (back.behaviour, back.extra_sequences[0].behaviour) == ([], [-0.25, -0.5])
    buffer.flush()
    (view,) = RunReader(tmp_path).samples(SampleQuery(group=0))
    assert view.interrupts == [(3, version)] and view.tokens == 3
    sequence_rows = sequences_of(view, lambda ids: str(list(ids)))
    assert [(q["sequence"], q["tokens"], q["response"]) for q in sequence_rows] == [(1, 2, str([0, 1]))]
    buffer.prune(1)
    buffer.flush()
    (view,) = RunReader(tmp_path).samples(SampleQuery(group=0))
    assert view.sample.extra_sequences[0].prompt_ids == [] and not view.has_tokens
    buffer.close()


@pytest.mark.gate
@pytest.mark.parametrize("train", ["all", "first"])
@pytest.mark.parametrize("agent", ["compacts", "rewrites"])
async def test_every_conversation_resumes_after_a_restart_at_any_token(agent: str, train: str) -> None:
    """From the ledger alone; answers on the side are in it, too."""
    replies = ["<answer>1</answer><eos>", "<answer>2</answer><eos>"]
    generate = build_generator(config(agent, {"train": train}), TOKENIZER, whole_model := Model(replies))
    await generate(reference := fresh(), prompt())
    assert [len(q.observed) for q in reference.sequences] == ([1, 1] if agent == "compacts" else [1, 0])
    if agent == "compacts":
        assert reference.extra_sequences[0].parent == 0
    for tokens in range(0, sum(q.sampled_tokens for q in reference.sequences), 4):
        s, model = fresh(), Model(replies, at_once=tokens)
        generate = build_generator(config(agent, {"train": train}), TOKENIZER, model)
        with pytest.raises(asyncio.CancelledError):
            await generate(s, prompt())
        s.status, model.at_once, model.asked = Status.PARKED, None, []
        for q in s.extra_sequences:
            q.status, q.last_turn = Status.PARKED, 0
        model.sides = model.sides[: sum(len(q.observed) + 1 for q in s.extra_sequences if q.tokens)]
        await generate(s, prompt())
        assert told(s) == told(reference)
    assert whole_model.sides


def told(s: Sample) -> list[object]:
    return [
        (q.prompt_ids, q.response_ids, q.mu, q.observed, q.parent, q.aside, q.last_turn) for q in s.sequences
    ]


@pytest.mark.gate
async def test_a_conversation_not_requested_again_after_a_restart_censors_the_sample() -> None:
    s = fresh()
    conversation = s.begin(TOKENIZER.encode("<bos><user>what else?<assistant><think>"))
    conversation.append(Segment(TOKENIZER.encode("1<eos>"), [-0.1, -0.1], [VersionSpan(1, 0, 2)]))
    with pytest.raises(ToolFailed, match="sent other requests after a restart than before"):
        await build_generator(config("sums"), TOKENIZER, Model())(s, prompt())


def test_splitting_a_sample_preserves_tokens_and_positions() -> None:
    """Of the helper that the trainer's test splits with."""
    s = Sample(0, 0, 0, [1, 2], seed=5)
    s.append(
        Segment(range(10, 22), [-i / 9 for i in range(12)], [VersionSpan(1, 0, 7), VersionSpan(2, 7, 12)])
    )
    ((group),) = split_groups([SampleGroup(0, 0, [s])])
    (split_sample,) = group.samples
    assert [list(q.response_ids) for q in split_sample.sequences] == [
        [10, 11, 12, 13],
        [14, 15],
        [16, *range(17, 22)],
    ]
    assert [q.prompt_ids for q in split_sample.extra_sequences] == [
        [1, 2, *range(10, 14)],
        [1, 2, *range(10, 16)],
    ]
    assert [q.versions() for q in split_sample.sequences] == [[1] * 4, [1] * 2, [1] + [2] * 5]
    assert SegmentReader(Path()).arrays(split_sample) is split_sample
