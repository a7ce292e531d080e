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
    tensor = torch.arange(n).view(shape)
    values: list[int] = []
    box_list = boxes(shape, start, end)
    for offset, size in box_list:
        values += tensor[tuple(slice(a, a + s) for a, s in zip(offset, size, strict=True))].flatten().tolist()
    assert values == list(range(start, end))
    assert len(box_list) <= max(2 * len(shape) - 1, 1)
