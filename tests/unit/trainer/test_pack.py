"""Packing: every token once, within the budget, the same number of micro-batches on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algo.figures import carried_over, comparable
from rlsys.core.spans import RouteSpan, TokenSpan, VersionSpan
from rlsys.core.types import Sample, Segment
from rlsys.trainer.bins import fill
from rlsys.trainer.pack import MicroBatch, TrainSample, pack


def sample(prompt: int, response: int, mark: int = 0) -> TrainSample:
    """Token ids that tell which sample and which place they come from."""
    ids = [1000 * mark + i for i in range(prompt + response)]
    return TrainSample(ids[:prompt], ids[prompt:], [-0.5] * response, [mark] * response, row=mark)


lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=40)


def sequences(batches: list[MicroBatch]) -> list[list[int]]:
    """Token lists of all sequences that train."""
    out = []
    for m in batches:
        for a, b in zip(m.cu_seqlens[:-1].tolist(), m.cu_seqlens[1:].tolist(), strict=True):
            if m.mask[a:b].any():
                out.append(m.tokens[a:b].tolist())
    return out


@given(lengths, st.integers(1, 200), st.integers(1, 5))
def test_every_sample_is_packed_once_and_ranks_get_equally_many_micro_batches(
    sizes: list[tuple[int, int]], budget: int, dp: int
) -> None:
    samples = [sample(p, r, i) for i, (p, r) in enumerate(sizes)]
    ranks = [pack(samples, budget, rank, dp) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    packed = sequences([m for batches in ranks for m in batches])
    assert sorted(packed) == sorted([*s.prompt_ids, *s.response_ids] for s in samples)
    assert sum(m.response_tokens for batches in ranks for m in batches) == sum(r for _, r in sizes)


@given(lengths, st.integers(1, 200), st.integers(1, 5))
def test_micro_batches_exceed_the_budget_only_for_one_oversized_sample(
    sizes: list[tuple[int, int]], budget: int, dp: int
) -> None:
    samples = [sample(p, r, i) for i, (p, r) in enumerate(sizes)]
    for rank in range(dp):
        for micro in pack(samples, budget, rank, dp):
            assert len(micro.tokens) <= budget or len(micro.cu_seqlens) == 2


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(5, 60),
    st.sampled_from([math.inf, 10.0]),
)
def test_each_sample_goes_into_the_cheapest_bin_with_room(
    sizes: list[int], bins: int, budget: int, crossover: float
) -> None:
    """The heaps do what a look at every bin would."""
    costs = [n + n**2 / crossover for n in sizes]
    expected_bins: list[list[int]] | None = [[] for _ in range(bins)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        assert expected_bins is not None
        room = [b for b in expected_bins if not b or sum(sizes[j] for j in b) + sizes[i] <= budget]
        if not room:
            expected_bins = None
            break
        min(room, key=lambda b: sum(costs[j] for j in b)).append(i)
    assert fill(sizes, costs, bins, budget) == expected_bins


@given(st.lists(st.integers(2, 60), min_size=8, max_size=64), st.sampled_from([math.inf, 10.0]))
def test_ranks_carry_almost_equal_loads(sizes: list[int], crossover: float) -> None:
    """In tokens where attention costs nothing, else in FLOPs."""

    def cost(tokens: int) -> float:
        return tokens + tokens**2 / crossover

    samples = [sample(1, n, i) for i, n in enumerate(sizes)]
    ranks = [pack(samples, 10_000, rank, 2, crossover=crossover) for rank in range(2)]
    loads = [sum(cost(len(s)) for s in sequences(batches)) for batches in ranks]
    assert abs(loads[0] - loads[1]) <= cost(max(sizes) + 1)


@pytest.mark.parametrize(("crossover", "expected"), [(math.inf, [9, 4]), (10.0, [1, 12])])
def test_a_long_sequence_costs_more_than_short_ones_of_as_many_tokens(
    crossover: float, expected: list[int]
) -> None:
    samples = [sample(1, n, i) for i, n in enumerate([60, *[10] * 12])]
    ranks = [pack(samples, 10_000, rank, 2, crossover=crossover) for rank in range(2)]
    assert [len(sequences(batches)) for batches in ranks] == expected


def test_fields_are_aligned_to_their_tokens() -> None:
    (micro,) = pack([sample(2, 3, 1), sample(1, 1, 2)], token_budget=100)
    assert micro.tokens.tolist() == [1000, 1001, 1002, 1003, 1004, 2000, 2001]
    assert micro.cu_seqlens.tolist() == [0, 5, 7]
    assert micro.mask.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert micro.mu.tolist() == [0, 0, -0.5, -0.5, -0.5, 0, -0.5]
    assert micro.versions.tolist() == [-1, -1, 1, 1, 1, -1, 2]
    assert micro.rows.tolist() == [1, 2]
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.response_tokens == 4


def test_samples_are_packed_in_order_of_length() -> None:
    (micro,) = pack([sample(1, n) for n in (5, 50, 7, 40)], token_budget=1000)
    assert (micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]).tolist() == [51, 41, 8, 6]


def test_a_rank_without_samples_computes_a_masked_one() -> None:
    first_batches, second_batches = (pack([sample(1, 4)], 100, rank, dp_size=2) for rank in range(2))
    assert [m.response_tokens for m in first_batches] == [4]
    assert [m.response_tokens for m in second_batches] == [0]
    assert len(second_batches[0].tokens) == 5


def test_packing_is_the_same_every_time() -> None:
    samples = [sample(1, 3 + i % 5, i) for i in range(20)]
    first, second = pack(samples, 30), pack(samples, 30)
    assert [m.tokens.tolist() for m in first] == [m.tokens.tolist() for m in second]


def test_the_number_of_micro_batches_is_a_multiple_for_interleaved_pipelines() -> None:
    batch = pack([sample(1, 3, i) for i in range(3)], token_budget=100, multiple=2)
    assert [m.response_tokens for m in batch] == [6, 3]
    (first, empty) = pack([sample(1, 3, 0)], token_budget=100, multiple=2)
    assert first.response_tokens == 3
    assert empty.response_tokens == 0
    assert empty.tokens.tolist() == first.tokens.tolist()


def test_packing_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        pack([], 10)


def test_a_train_sample_keeps_mu_and_versions_of_its_segments() -> None:
    sample = Sample(sample_id=1, group_id=7, index=0, prompt_ids=[1, 2], seed=0)
    sample.append(Segment([3, 4], [-1.0, -2.0], [VersionSpan(1, 0, 2)]))
    sample.append(Segment([5], [-3.0], [VersionSpan(2, 0, 1)]))
    row = TrainSample.of(sample, row=7)
    assert tuple(map(list, (row.response_ids, row.mu, row.versions))) == (
        [3, 4, 5],
        [-1.0, -2.0, -3.0],
        [1, 1, 2],
    )
    assert (row.row, len(row)) == (7, 5)


def test_a_transferred_sample_is_trained_on_its_group_prompt_and_never_compared() -> None:
    sample = Sample(1, 7, 0, [1, 2], 0, [3, 4], [-1.0, -2.0], [VersionSpan(5, 0, 2)])
    sample.routes = [RouteSpan(0, 3, bytes(3))]
    transferred_sample = replace(
        sample, prompt_ids=[1], trained_prompt=[1, 2], routes=[RouteSpan(0, 2, bytes(2))]
    )
    (batch,) = pack([TrainSample.of(sample, 0), TrainSample.of(transferred_sample, 1)], 100)
    batch.version = 5
    assert batch.tokens.tolist() == [1, 2, 3, 4] * 2
    row_start = int(batch.rows[0] == 1) * 4  # where the sequence of row 0 begins
    assert [(s.start, s.end) for s in batch.routes] == [(row_start, row_start + 3)]
    assert batch.keep.sum() == 4
    assert comparable(batch).nonzero().flatten().tolist() == [row_start + 2, row_start + 3]


@pytest.mark.parametrize(
    ("prompt", "response", "mu", "versions"),
    [([], [1], [0.0], [0]), ([1], [], [], []), ([1], [2], [], [0]), ([1], [2], [0.0], [0, 1])],
)
def test_uneven_samples_are_refused(
    prompt: list[int], response: list[int], mu: list[float], versions: list[int]
) -> None:
    with pytest.raises(ValueError, match="not empty, and one value per response token"):
        TrainSample(prompt, response, mu, versions)


def test_tokens_that_follow_older_weights_are_marked_as_carried_over() -> None:
    """What kept keys and values cost shows on them alone."""
    went_on = TrainSample([1, 2], [3, 4, 5, 6], [-0.5] * 4, [1, 1, 2, 2], trained=[True, True, True, False])
    fresh, stale_sample = (TrainSample([1], [3, 4], [-0.5] * 2, [version] * 2) for version in (2, 1))
    [batch] = pack([went_on, fresh, stale_sample], 100)
    batch.version = 2
    assert batch.tokens[comparable(batch)].tolist() == [5, 3, 4]
    assert batch.tokens[comparable(batch) & carried_over(batch)].tolist() == [5]


@pytest.mark.parametrize("which", ["observed", "masked", "both", "neither"])
def test_observed_and_masked_tokens_are_not_trained(which: str) -> None:
    sample = Sample(0, 0, 0, [1, 2], seed=0)
    sample.append(Segment([5, 6], [-0.5, -0.5], [VersionSpan(1, 0, 2)]))
    trained = [1.0] * 4
    if which in ("observed", "both"):
        sample.observe([7, 8])
        trained[2:] = [0.0, 0.0]
    else:
        sample.append(Segment([7, 8], [-0.5, -0.5], [VersionSpan(1, 0, 2)]))
    if which in ("masked", "both"):
        sample.masked.append(TokenSpan(0, 1))
        trained[0] = 0.0
    packed = TrainSample.of(sample)
    (micro,) = pack([packed], 64)
    assert micro.mask.tolist() == [False, False, *map(bool, trained)]
