"""What sequences have in common at their beginning: which tokens are shared, and how they are packed together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.convert.prefixes import computed, cost, group_of
from rlsys.trainer.model.attention import Padding, Rectangle
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.pack import MicroBatch, PrefixSharing, TrainSample, build, pack
from rlsys.trainer.prefixes import Prefixes, order_sequences, shared_tokens


class OneRank:
    """A context-parallel group of this rank alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def sample(
    prompt: list[int], response: list[int], row: int = 0, version: int = 0, **more: object
) -> TrainSample:
    n = len(response)
    return TrainSample(prompt, response, [-0.5] * n, [version] * n, row, **more)  # type: ignore[arg-type]


def group(prompt: list[int], responses: list[list[int]], first: int = 0) -> list[TrainSample]:
    return [sample(prompt, r, first + i) for i, r in enumerate(responses)]


def test_the_last_common_token_is_computed_by_each() -> None:
    a, b = np.array([5, 6, 7, 8]), np.array([5, 6, 9])
    assert shared_tokens(a, b) == 1
    assert shared_tokens(a, a) == 3
    assert shared_tokens(a, np.array([1, 2])) == 0


def test_sequences_are_ordered_by_the_longest_prefix_shared_with_the_previous() -> None:
    tokens = [
        np.array(t) for t in ([1, 2, 3, 4], [9], [1, 2, 3, 4, 5, 6, 7], [1, 2, 8], [1, 2, 3, 4, 5, 6, 8])
    ]
    assert order_sequences(tokens, [0] * 5, [None] * 5) == ([0, 2, 4, 3, 1], [0, 3, 5, 1, 0])
    # With another key nothing is shared; with a limit, no more than what may be common.
    assert order_sequences(tokens, [0, 0, 1, 0, 1], [None, None, 4, None, None]) == (
        [0, 3, 1, 2, 4],
        [0, 1, 0, 0, 3],
    )


def test_a_micro_batch_keeps_every_sequence_whole() -> None:
    micro = build(group([1, 2, 3], [[4, 5], [6], [7, 8]]), "yes")
    assert micro.sequence_lengths == [5, 4, 5] and micro.prefixes == [0, 2, 2]
    assert micro.computed_lengths == [5, 2, 3]
    assert micro.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 1, 2, 3, 7, 8]
    assert build(group([1, 2, 3], [[4, 5], [6]])).prefixes == []


@pytest.mark.parametrize("more", [{"support": b"\0\0"}, {}])
def test_response_tokens_with_support_or_routes_are_not_shared(more: dict[str, bytes]) -> None:
    samples = [sample([1, 2, 3], [4, 5], **more), sample([1, 2, 3], [4, 6], **more)]
    assert build(samples, "yes").prefixes == [0, 2 if more else 3]
    assert build(samples, "by route").prefixes == [0, 2]


def test_prompts_that_other_weights_routed_are_not_shared() -> None:
    samples = [sample([1, 2, 3], [4], version=0), sample([1, 2, 3], [5], version=1)]
    assert build(samples, "yes").prefixes == [0, 2]
    assert build(samples, "by route").prefixes == []


def test_computed_tokens_fill_the_budget() -> None:
    """Two groups of a prompt of 30 tokens and eight responses of 2: 32 + 7 * 3 = 53 computed tokens each."""
    samples = group([1] * 30, [[10 + i, 9] for i in range(8)]) + group(
        [2] * 30, [[10 + i, 9] for i in range(8)], 8
    )
    batches = pack(samples, 53, shared="yes")
    assert [sum(m.computed_lengths) for m in batches] == [53, 53]
    assert [len(set(m.tokens[m.cu_seqlens[:-1].long()].tolist())) for m in batches] == [1, 1]
    assert len(pack(samples, 53)) == 16


def test_a_single_group_is_split_evenly_over_the_ranks() -> None:
    """Long responses to a short prompt: two ranks share the group evenly, one part each."""
    group_samples = group([1, 2, 3], [[10 + i] * 40 for i in range(4)])
    parts = [pack(group_samples, 1000, rank, 2, shared="yes") for rank in range(2)]
    assert [[m.copy for m in batches] for batches in parts] == [[False], [False]]
    assert [[sorted(m.rows.tolist()) for m in batches] for batches in parts] == [
        [[0, 1]],
        [[2, 3]],
    ] or sorted(len(m.rows) for batches in parts for m in batches) == [2, 2]


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=4)
answers = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=6)), min_size=1, max_size=12
)


@given(prompts, answers, st.integers(1, 40), st.integers(1, 3), st.sampled_from(["yes", "by route"]))
def test_every_sample_is_packed_once_within_the_budget(
    asked: list[list[int]], made: list[tuple[int, list[int]]], budget: int, dp: int, shared: PrefixSharing
) -> None:
    samples = [sample(asked[p % len(asked)], r, i) for i, (p, r) in enumerate(made)]
    ranks = [pack(samples, budget, rank, dp, shared=shared, crossover=50.0) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    packed_rows = []
    for micro in (m for batches in ranks for m in batches):
        assert sum(micro.computed_lengths) <= budget or micro.sequences == 1
        parts = micro.tokens.split(micro.sequence_lengths)
        for i, (row, part) in enumerate(zip(micro.rows.tolist(), parts, strict=True)):
            assert part.tolist() == [*samples[row].prompt_ids, *(int(t) for t in samples[row].response_ids)]
            k = micro.prefixes[i] if micro.prefixes else 0
            assert not k or part[: k + 1].tolist() == parts[i - 1][: k + 1].tolist()
        if not micro.copy:
            packed_rows += micro.rows.tolist()
    assert sorted(packed_rows) == list(range(len(samples)))


@given(prompts, answers)
def test_a_share_computes_each_shared_token_once(
    asked: list[list[int]], made: list[tuple[int, list[int]]]
) -> None:
    samples = [sample(asked[p % len(asked)], r, i) for i, (p, r) in enumerate(made)]
    micro = build(samples, "yes")
    share = share_of(micro)
    full_share = share_of(build(samples, "no"))
    assert len(share.tokens) == sum(micro.computed_lengths) <= len(full_share.tokens)
    assert share.tokens[share.padded_index].tolist() == micro.tokens.tolist()
    assert share.source[share.padded_index].le(torch.arange(len(micro.tokens))).all()
    assert int(share.multiplicity().sum()) == len(micro.tokens)
    positions = [torch.arange(n) for n in micro.sequence_lengths]
    assert share.position_ids[share.padded_index].tolist() == torch.cat(positions).tolist()
    last = torch.zeros(len(micro.tokens), dtype=torch.bool)
    last[micro.cu_seqlens[1:].long() - 1] = True
    assert share.following[share.padded_index][~last].tolist() == micro.tokens.roll(-1)[~last].tolist()
    for k, computed_length, shared_prefix in zip(
        micro.prefixes, micro.computed_lengths, share.prefixes, strict=False
    ):
        assert len(shared_prefix) == k and computed_length > 0


def share_of(micro: MicroBatch) -> Share:
    return Share.of(micro, 1, OneRank(), torch.device("cpu"))  # type: ignore[arg-type]


def test_rectangles_include_the_keys_of_shared_prefixes() -> None:
    """Sequences of 4, 2 and 2 own tokens; the last two share tokens 0 and 1 of the first."""
    prefixes = [torch.tensor([], dtype=torch.int64), torch.tensor([0, 1]), torch.tensor([0, 1])]
    padding = Padding.of([4, 2, 2], torch.device("cpu"), prefixes)
    assert padding.rectangles == [Rectangle(1, 4, 0), Rectangle(2, 2, 2)]
    assert padding.to_padded.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert padding.to_keys is not None
    assert padding.to_keys.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 6, 7]


def test_the_cost_of_a_group_counts_its_shared_prompt_once() -> None:
    """A prompt of 10 and responses of 2 and 4: 12 tokens, then 5 that attend to 14."""
    members = group_of(10, [2, 4], shared=True)
    assert members == [(12, 0), (14, 9)] and computed(members) == 17
    assert cost(members, math.inf) == 17
    assert cost(members, 10.0) == pytest.approx(17 + (144 + 196 - 81) / 10)
    assert computed(group_of(10, [2, 4], shared=False)) == 26


def test_shared_prefixes_are_computed_from_prompts() -> None:
    samples = [*group([1, 2, 3], [[4], [5, 6]]), sample([1, 9], [7])]
    prefixes = Prefixes.of(samples, by_route=False)
    assert [prefixes.order[i] for i in range(3)] == [1, 0, 2] and prefixes.shared == [0, 2, 0]
    assert prefixes.of_bin([0, 1]) == [(5, 0), (4, 2)]
    assert prefixes.units(7) == [[1, 0], [2]] and prefixes.units(6) == [[1], [0], [2]]
