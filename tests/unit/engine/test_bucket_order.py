"""The order of a sharded push: who sends and who takes never wait for one another in a circle."""

from __future__ import annotations

from collections import Counter, deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engine.hooks.bucket_hooks import unpack
from rlsys.engine.hooks.bucket_order import (
    Buckets,
    aligned_size,
    description_size,
    encode_description,
    receiver_rank,
)

SIZES = st.lists(st.lists(st.integers(9, 99), max_size=4), min_size=1, max_size=7)


def told(sizes: list[list[int]], engine: int, engines: int) -> Buckets:
    return Buckets(tuple(range(len(sizes))), tuple(map(tuple, sizes)), engine, engines)


def sends(sizes: list[list[int]], engines: int, place: int) -> list[tuple[int, int, int]]:
    """(engine, place, number of the bucket), as SendersGroup.send goes through them."""
    return [((place + t) % engines, place, n) for n in range(len(sizes[place])) for t in range(engines)]


@given(SIZES, st.integers(1, 6))
def test_every_engine_receives_every_bucket_once_in_order(sizes: list[list[int]], engines: int) -> None:
    for engine in range(engines):
        order = list(told(sizes, engine, engines).order())
        assert Counter(order) == Counter((p, size) for p, each in enumerate(sizes) for size in each)
        for sender, each in enumerate(sizes):
            assert [size for p, size in order if p == sender] == each


@given(SIZES, st.integers(1, 6), st.integers(1, 4))
def test_the_bucket_order_is_free_of_deadlock_with_blocking_sends(
    sizes: list[list[int]], engines: int, tp: int
) -> None:
    """Each sender and each engine does one thing at a time, in its order; a bucket passes when both are at it."""
    out = [deque(sends(sizes, engines, sender)) for sender in range(len(sizes))]
    numbers = [Counter[int]() for _ in range(engines)]
    into: list[deque[tuple[int, int, int]]] = []
    for engine in range(engines):
        into.append(deque())
        for sender, _ in told(sizes, engine, engines).order():
            into[-1].append((engine, sender, numbers[engine][sender]))
            numbers[engine][sender] += 1
    while any(into):
        passed = [queue for queue in into if queue and out[queue[0][1]][0] == queue[0]]
        assert passed, "everybody waits"
        for queue in passed:
            out[queue.popleft()[1]].popleft()
    assert not any(out)
    assert {receiver_rank(sender, tp) for sender in range(tp)} == set(range(tp))


@given(st.integers(1, 40), st.integers(1, 40))
def test_each_step_distributes_senders_evenly_over_engines(senders: int, engines: int) -> None:
    """The engines' links are used evenly, and so are the senders'."""
    sizes = [[9]] * senders
    orders = [list(told(sizes, engine, engines).order()) for engine in range(engines)]
    steps = [[(engine - sender) % engines for sender, _ in order] for engine, order in enumerate(orders)]
    for of_engine in steps:
        assert of_engine == sorted(of_engine)
    counts = [Counter(of_engine) for of_engine in steps]
    for step in range(engines):
        each = [of_engine[step] for of_engine in counts]
        assert sum(each) == senders and max(each) - min(each) <= 1


def test_bucket_orders_survive_an_encode_decode_round_trip() -> None:
    buckets = told([[10, 20], [], [5]], 1, 2)
    assert Buckets.decode(buckets.encode()) == buckets
    for wrong in ("{}", "[]", '{"ranks":[0],"sizes":[],"engine":0,"engines":1}', "no json"):
        with pytest.raises(ValueError):
            Buckets.decode(wrong)


def test_unpack_recovers_the_tensors_of_a_bucket_from_its_description() -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.arange(4, dtype=torch.float32).reshape(2, 2),
        "c": torch.tensor(7, dtype=torch.int64),
        "d": torch.zeros(0, 4),
    }
    memory = b""
    for tensor in tensors.values():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        memory += data.ljust(aligned_size(len(data)), b"\0")
    memory += encode_description(
        [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]
    )
    named_tensors = unpack(torch.frombuffer(bytearray(memory), dtype=torch.uint8))
    assert named_tensors is not None
    assert {name: tensor.tolist() for name, tensor in named_tensors} == {
        n: t.tolist() for n, t in tensors.items()
    }
    assert [tensor.dtype for _, tensor in named_tensors] == [t.dtype for t in tensors.values()]
    assert description_size(bytes(8)) is None and unpack(torch.zeros(64, dtype=torch.uint8)) is None
