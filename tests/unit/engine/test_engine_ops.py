"""SGLang's operators in plain torch, against numbers worked out another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlsys.engine.cpu import ops
from rlsys.engine.cpu.ops import add_gated, attend, decode_batched, norm_by_sums, sums_of_squares


def test_a_shared_experts_gate_is_a_sigmoid_per_token() -> None:
    output = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    hidden, shared = torch.tensor([[0.0, 5.0], [math.log(3), 5.0]]), torch.tensor([[10.0, 20.0], [4.0, 8.0]])
    add_gated(hidden, torch.tensor([1.0, 0.0]), shared, output)  # sigmoid(0) = 1/2, sigmoid(log 3) = 3/4
    assert torch.allclose(output, torch.tensor([[6.0, 12.0], [6.0, 10.0]]))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_norm_over_all_heads_needs_the_sums_of_all_ranks(tokens: int) -> None:
    """Two ranks with half of the width each give what one gives with all of it."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(tokens, n, generator=generator) for n in (8, 4))
    weights = torch.randn(8, generator=generator), torch.randn(4, generator=generator)
    expected = [
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w
        for x, w in zip((q, k), weights, strict=True)
    ]
    ranks = list(zip(q.chunk(2, 1), k.chunk(2, 1), *(w.chunk(2) for w in weights), strict=True))
    sums = sum((sums_of_squares(shard[0], shard[1]) for shard in ranks), torch.zeros(()))
    assert len(sums) % 4 == 0
    parts = [norm_by_sums(x, y, of_x, of_y, sums, 2) for x, y, of_x, of_y in ranks]
    for i, full_norm in enumerate(expected):
        assert torch.allclose(torch.cat([part[i] for part in parts], 1), full_norm, atol=1e-6)


def test_a_sink_takes_its_share_of_the_weights() -> None:
    """One head, equal scores: two keys and a sink of logit log 2 weigh 1/4, 1/4 and 1/2."""
    q, k = torch.zeros(1, 1, 2), torch.ones(2, 1, 2)
    v = torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]])
    output = attend(q, k, v, 1.0, None, torch.tensor([math.log(2)]))
    assert torch.allclose(output, torch.tensor([[[1.0, 2.0]]]))


def test_a_sliding_window_masks_earlier_keys_even_if_nan() -> None:
    """Decoding the fourth token with a window of one key before it."""
    nothing = torch.full((1, 1, 2), float("nan"))
    k = torch.cat([nothing, nothing, torch.ones(2, 1, 2)])
    v = torch.cat([nothing, nothing, torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])])
    output = attend(torch.zeros(1, 1, 2), k, v, 1.0, 1, torch.tensor([float("-inf")]))
    assert torch.allclose(output, torch.tensor([[[1.0, 1.0]]]))


def test_attention_is_causal_and_heads_share_keys() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, heads, 4, generator=generator) for n, heads in ((3, 4), (5, 2), (5, 2)))
    sinks = torch.randn(4, generator=generator)
    output = attend(q, k, v, 0.5, None, sinks)
    for token in range(3):
        for head in range(4):
            last = 2 + token  # the three new tokens are the last of five
            scores = k[: last + 1, head // 2] @ q[token, head] * 0.5
            weights = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
            assert torch.allclose(output[token, head], weights @ v[: last + 1, head // 2], atol=1e-6)


def decode(lengths: list[int], *, groups: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Requests of these lengths, whose places are those of the ten longest ones: `[s, 4, 6]`."""
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(500, groups, d, generator=generator).to(dtype) for d in (8, 6))
    keys[0], values[0] = float("nan"), float("nan")
    cache_slots = torch.randint(1, 500, (10, 100), generator=generator)
    query = torch.randn(10, 4, 8, generator=generator).to(dtype)
    requests, many = torch.arange(len(lengths)) % 10, torch.tensor(lengths)
    for request, length in zip(requests.tolist(), lengths, strict=True):
        cache_slots[request, length:] = 0
    output = torch.zeros(len(lengths), 4, 6, dtype=dtype)
    result = decode_batched(
        never, None, query[requests], output, keys, values, cache_slots, requests, many, scaling=0.3
    )
    for i, length in enumerate(lengths):
        k, v = (
            x[cache_slots[i % 10, :length]].float().repeat_interleave(4 // groups, 1) for x in (keys, values)
        )
        weights = (torch.einsum("nd,knd->nk", query[i % 10].float(), k) * 0.3).softmax(-1)
        expected = torch.einsum("nk,kne->ne", weights, v)
        assert torch.allclose(result[i].float(), expected, atol=1e-6 if dtype is torch.float32 else 1e-2), (
            i,
            length,
        )
    return result


def never(*args: object, **more: object) -> Tensor:
    raise AssertionError("SGLang's own")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_batched_decoding_is_bitwise_independent_of_the_batch(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whatever else is decoded: that is what a sample's seed promises."""
    lengths = [1, 31, 32, 33, 64, 97, 100, 5, 32, 40]
    together = decode(lengths, groups=groups)
    for n in (1, 2, 5, 9):
        assert torch.equal(decode(lengths[:n], groups=groups), together[:n])
    monkeypatch.setattr(ops, "MAX_GATHERED", 1)  # one at a time
    assert torch.equal(decode(lengths, groups=groups), together)
    decode(lengths, groups=groups, dtype=torch.bfloat16)


def test_sliding_windows_and_encoders_are_delegated_to_sglang() -> None:
    calls: list[dict[str, object]] = []

    def upstream(*args: object, **more: object) -> Tensor:
        calls.append(more)
        return torch.ones(1)

    some = torch.ones(1, 1, 1)
    for more in ({"sliding_window_size": 4}, {"encoder_lens": torch.ones(1)}):
        output = decode_batched(
            upstream, None, some, some, some, some, some, some, some, causal=False, **more
        )
        assert torch.equal(output, torch.ones(1))
    assert [a["sliding_window_size"] for a in calls] == [4, None] and not any(a["causal"] for a in calls)
