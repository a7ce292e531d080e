"""Ranges of a flattened tensor as boxes of the tensor (megatron_patches/optimizer_local_shards.py)."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_patches.optimizer_local_shards import boxes


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_hold_the_range_in_its_order_and_are_few(sizes: list[int], data: st.DataObject) -> None:
    shape = tuple(sizes)
    n = math.prod(shape)
    start = data.draw(st.integers(0, n))
    end = data.draw(st.integers(start, n))
    whole = torch.arange(n).view(shape)
    seen: list[int] = []
    found = boxes(shape, start, end)
    for at, size in found:
        seen += whole[tuple(slice(a, a + s) for a, s in zip(at, size, strict=True))].flatten().tolist()
    assert seen == list(range(start, end))
    assert len(found) <= max(2 * len(shape) - 1, 1)
