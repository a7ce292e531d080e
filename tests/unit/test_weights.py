"""Buckets of tensors, without an engine."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.weights.sync import buckets


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=30), st.integers(4, 400))
def test_buckets_hold_every_tensor_in_order_within_their_size(
    shapes: list[tuple[int, bool]], max_bytes: int
) -> None:
    tensors = [
        (f"t{i}", torch.full((n,), i, dtype=torch.bfloat16 if half else torch.float32))
        for i, (n, half) in enumerate(shapes)
    ]
    made = list(buckets(iter(tensors), max_bytes))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in made:
        size = sum(t.numel() * t.element_size() for _, t in bucket)
        assert size <= max_bytes or len(bucket) == 1
        assert len({t.dtype for _, t in bucket}) == 1


def test_neighbours_share_a_bucket() -> None:
    tensors = [(name, torch.zeros(10)) for name in "abcde"]
    assert [[name for name, _ in b] for b in buckets(tensors, 80)] == [["a", "b"], ["c", "d"], ["e"]]
