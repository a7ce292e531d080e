"""Samples that begin with another one's tokens: every array, every count, in memory and in the ledger."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.core.forks import Forced, fork, truncate_sample
from rlsys.core.spans import Fork, RouteSpan, VersionSpan
from rlsys.core.types import LogProbResult, Prompt, Sample, Segment
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.ledger.store import FILE_NAME
from rlsys.segments import support


def stem(sample_id: int = 0) -> Sample:
    """Six tokens of two versions, the third observed; each sampled from itself and one other; routes of one byte."""
    s = Sample(sample_id, 0, sample_id, [1, 2], seed=5)
    encoded_support = support.encode([[10, 50], [11, 50]], [10, 11])
    s.append(Segment([10, 11], [-0.1, -0.2], [VersionSpan(1, 0, 2)], support=encoded_support))
    s.observe([3])
    encoded_support = support.encode([[13, 50], [14, 50], [15, 50]], [13, 14, 15])
    s.append(Segment([13, 14, 15], [-0.3, -0.4, -0.5], [VersionSpan(2, 0, 3)], support=encoded_support))
    s.routes = [RouteSpan(0, 3, b"abc"), RouteSpan(3, 7, b"defg")]
    s.behaviour = [-1.0, -2.0, float("nan"), -3.0]
    return s


def test_a_fork_begins_with_the_tokens_of_its_stem() -> None:
    s, f = stem(), Sample(1, 0, 1, [1, 2], seed=6)
    with pytest.raises(ValueError, match="because a forced token needs a log-prob of the whole vocabulary"):
        fork(s, 4, f, Forced(99, -0.7))
    s.support.clear()
    fork(s, 4, f, Forced(99, -0.7))
    assert (list(f.response_ids), list(f.mu)) == ([10, 11, 3, 13, 99], [-0.1, -0.2, 0.0, -0.3, -0.7])
    assert f.versions() == [1, 1, 1, 2, 2] and f.trained() == [True, True, False, True, True]
    assert (f.fork, f.inherited_tokens, f.sampled_tokens, f.received_tokens) == (Fork(0, 4), 4, 4, 0)
    # What the engine chose at position 5 predicted token 4, drawn or forced.
    assert [(r.start, r.end, r.experts) for r in f.routes] == [(0, 3, b"abc"), (3, 6, b"def")]
    assert f.behaviour[3] == -3.0 and f.mu_sum == pytest.approx(-1.3)


def test_a_fork_without_a_forced_token_continues_from_the_stems_token() -> None:
    s, f = stem(), Sample(1, 0, 1, [1, 2], seed=6)
    fork(s, 3, f)
    assert list(f.response_ids) == [10, 11, 3] and f.observed_last
    assert [(r.start, r.end) for r in f.routes] == [(0, 3), (3, 4)]
    assert (f.inherited_tokens, f.received_tokens) == (2, 0)
    plane = Sample(2, 0, 2, [1, 2], seed=7)
    fork(s, 0, plane)
    assert (plane.tokens, plane.inherited_tokens, plane.routes) == (0, 0, [])


def test_only_siblings_fork() -> None:
    s = stem()
    for sample in (
        Sample(1, 1, 1, [1, 2], 0), Sample(1, 0, 1, [1, 3], 0), stem(1), s,
    ):  # fmt: skip
        with pytest.raises(ValueError):
            fork(s, 2, sample)
    with pytest.raises(ValueError, match="after 6 response tokens; expected 0 to 5"):
        fork(s, 6, Sample(1, 0, 1, [1, 2], 0), Forced(1, -1.0))


def test_truncated_tokens_are_counted() -> None:
    s = stem()
    truncate_sample(s, 4)
    assert (list(s.response_ids), s.discarded, s.received_tokens) == ([10, 11, 3, 13], 2, 5)
    assert [(r.start, r.end, r.experts) for r in s.routes] == [(0, 3, b"abc"), (3, 5, b"de")]
    assert (s.support.count(0), s.versions(), len(s.behaviour)) == (4, [1, 1, 1, 2], 4)
    f = Sample(1, 0, 1, [1, 2], seed=6)
    fork(s, 4, f)
    f.append(Segment([7], [-0.6], [VersionSpan(3, 0, 1)], support=support.encode([[7, 9]], [7])))
    truncate_sample(f, 2)
    assert (f.inherited_tokens, f.discarded, f.fork, f.received_tokens) == (2, 1, Fork(0, 2), 1)
    truncate_sample(f, 0)
    assert (f.tokens, f.inherited_tokens, f.discarded, f.fork, f.routes) == (0, 0, 1, None, [])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sample", "fork", "force", "cut", "score", "save", "reopen"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=30,
)


def arrays(s: Sample) -> tuple[object, ...]:
    return (
        list(s.response_ids), list(s.mu), s.spans, s.routes, s.fork, s.inherited_tokens, s.discarded, 
        bytes(s.support), repr(s.behaviour),
    )  # fmt: skip


@pytest.mark.gate
@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_the_ledger_records_every_fork_tree_and_all_engine_tokens(
    steps: Sequence[tuple[str, int, int, int]],
) -> None:
    """Its tokens are those that engines made, with those that forks were given, without what was cut off."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        buffer = RolloutBuffer(folder / FILE_NAME, "run", 4)
        version = buffer.versions.new(0)
        group = buffer.issue(Prompt(0, "", [1, 2], {}), [5, 6, 7, 8])
        buffer.flush()
        received = base = 0
        for action, sample_index, source_index, tokens in steps:
            s, source = group.samples[sample_index], group.samples[source_index]
            if action == "sample":
                position = s.tokens
                s.append(
                    Segment(
                        range(position, position + tokens), [-0.1] * tokens, [VersionSpan(version, 0, tokens)]
                    )
                )
                read = s.routes[-1].end if s.routes else 0
                s.routes.append(RouteSpan(read, 1 + s.tokens, b"x" * (1 + s.tokens - read)))
                received += tokens
            elif (
                action in ("fork", "force")
                and sample_index != source_index
                and not s.tokens
                and source.tokens
            ):
                forced = Forced(9, -1.0) if action == "force" else None
                fork(source, tokens % source.tokens, s, forced)
            elif action == "cut" and s.tokens:
                truncate_sample(s, tokens % s.tokens)
                buffer.save([s])
            elif action == "score" and len(s.behaviour) < s.tokens:
                buffer.save([s])
                buffer.store_scores([LogProbResult(s.sample_id, len(s.behaviour), [-0.5])])
            elif action == "save":
                buffer.save([s])
            elif action == "reopen":
                buffer.save(group.samples)
                buffer.flush()
                saved_arrays = [arrays(s) for s in group.samples]
                assert [arrays(s) for s in RunReader(folder).groups("1")[0].samples] == saved_arrays
                ledger = buffer.ledger()
                check_ledger(ledger)
                assert (
                    sum(ledger.tokens.values()) - ledger.inherited_tokens + ledger.discarded_tokens
                    == base + received
                )
                assert buffer.added_tokens == received
                buffer.close()
                buffer = RolloutBuffer(folder / FILE_NAME, "run", 4)
                (group,) = buffer.active()
                assert [arrays(s) for s in group.samples] == saved_arrays
                base, received = base + received, 0
        buffer.close()
