"""The gated delta rule against its definition, token by token; SGLang's operators made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.engine.cpu import delta
from rlsys.ops.delta_rule import CHUNK, delta_rule, normalize


def some(length: int, rows: int = 2, heads: int = 3, key: int = 4, value: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v, g, beta = (
        torch.randn(rows, length, heads, *size, generator=generator, dtype=torch.float64)
        for size in ((key,), (key,), (value,), (), ())
    )
    return [q, normalize(k), v, -g.abs(), beta.sigmoid()]


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        u = (v[:, t] - torch.einsum("rhp,rhpw->rhw", k[:, t], state)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * u[:, :, None]
        out.append(torch.einsum("rhp,rhpw->rhw", q[:, t], state))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_the_chunked_delta_rule_equals_the_token_by_token_recurrence(length: int) -> None:
    """The last state and all gradients too."""
    inputs = [x.requires_grad_() for x in some(length)]
    state = torch.randn(
        2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    results = []
    for rule in (delta_rule, token_by_token):
        q, k, v, g, beta = inputs
        out, last = rule(q, k, v, g, beta, state)
        gradients = torch.autograd.grad((out * out.detach().cos()).sum() + last.sum(), [*inputs, state])
        results.append([out, last, *gradients])
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, atol=1e-9)


def test_a_sequence_may_be_read_in_parts() -> None:
    inputs = some(100)
    first, state = delta_rule(*(x[:, :37] for x in inputs))
    q, k, v, g, beta = (x[:, 37:] for x in inputs)
    second, last = delta_rule(q, k, v, g, beta, state)
    out, expected = delta_rule(*inputs)
    assert torch.allclose(torch.cat([first, second], 1), out, atol=1e-9)
    assert torch.allclose(last, expected, atol=1e-9)


def test_full_decay_removes_the_earlier_state() -> None:
    """A decay of exp(-800) is 0, and no number becomes infinite on the way."""
    inputs = some(80)
    inputs[3] = torch.full_like(inputs[3], -800.0)
    out, _ = delta_rule(*inputs)
    last_output, _ = delta_rule(*(x[:, 79:] for x in inputs))
    assert torch.allclose(out[:, 79:], last_output)


KEYS, VALUES, P, W, WIDTH = 2, 4, 8, 4, 4
CHANNELS = 2 * KEYS * P + VALUES * W


def through(lengths: list[int], more: int) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths, of requests in slots 3, 1, ..., then `more` tokens of all, one by one: what the last
    token of each reads `[B, H w]`, and all slots' states."""
    generator = torch.Generator().manual_seed(0)
    weight, a_log, bias = (
        torch.randn(*n, generator=generator) for n in ((CHANNELS, WIDTH), (VALUES,), (VALUES,))
    )
    xs = torch.randn(3, 40, CHANNELS, generator=generator)
    bs, as_ = (torch.randn(3, 40, VALUES, generator=generator) for _ in range(2))
    conv, states = torch.zeros(5, CHANNELS, WIDTH - 1), torch.zeros(5, VALUES, W, P)
    states[[0, 4]] = torch.nan  # nobody's
    slots = torch.tensor([3, 1, 2][: len(lengths)])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    x, b, a = (torch.cat([part[i, :n] for i, n in enumerate(lengths)]) for part in (xs, bs, as_))
    fresh = torch.zeros(len(lengths), dtype=torch.bool)
    mixed = delta.convolve_prompts(x.t(), weight, None, conv, starts, lengths, slots, fresh).t()
    q, k, v = mixed.split([KEYS * P, KEYS * P, VALUES * W], 1)
    g, beta = delta.decays(a_log, a, b, bias)
    q, k, v = (x[None].unflatten(2, (-1, size)) for x, size in ((q, P), (k, P), (v, W)))
    out, *_ = delta.prefill(q, k, v, g, beta, states, slots, starts)
    last = out[0, starts[1:] - 1].flatten(1)
    for step in range(more):
        positions = [n + step for n in lengths]
        x, b, a = (torch.stack([part[i, t] for i, t in enumerate(positions)]) for part in (xs, bs, as_))
        mixed = delta.convolve_next(x, conv, weight, conv_state_indices=slots)
        into = torch.empty(len(lengths), 1, VALUES, W)
        delta.decode(mixed, a, b, a_log, bias, P**-0.5, states, into, slots)
        last = into.flatten(1)
    return last, states


def test_decoding_continues_from_the_state_of_the_prompt() -> None:
    """Shorter prompts, also than the convolution is wide, and more tokens one by one give what the prompts give."""
    prompt_output, states = through([9, 12, 20], 0)
    later, decoded_states = through([3, 6, 14], 6)
    assert torch.allclose(later, prompt_output, atol=1e-5)
    assert torch.allclose(decoded_states[1:4], states[1:4], atol=1e-5)
    assert torch.equal(through([3], 6)[0], later[:1]), "whatever else is decoded"


def test_projections_are_split_by_key_head() -> None:
    """Two key heads of size 1, two values of size 1 each."""
    mixed = torch.arange(12.0)[None]  # q k v v z z, twice
    qkv, z, b, a = delta.split_projections(mixed, torch.arange(8.0)[None], 2, 4, 1, 1)
    assert qkv.tolist() == [[0, 6, 1, 7, 2, 3, 8, 9]]
    assert z.flatten().tolist() == [4, 5, 10, 11]
    assert (b.tolist(), a.tolist()) == ([[0, 1, 4, 5]], [[2, 3, 6, 7]])


def test_a_gated_norm_is_a_norm_times_its_gate() -> None:
    x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 100.0]])  # SiLU: 0 and 100
    output = delta.gated_norm(x, gate, torch.tensor([1.0, 2.0]), None, eps=0.0)
    assert torch.allclose(output, torch.tensor([[0.0, 200 * 4 / 12.5**0.5]]))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"activation": "sigmoid"}, "activation = 'sigmoid': expected 'silu' or 'swish'"),
        (
            {"bias": torch.zeros(2)},
            r"bias of shape \[2\], residual of shape None, prenorm = False: expected .*",
        ),
        ({"residual": torch.zeros(1, 2)}, r"bias of shape None, residual of shape \[1, 2\], .*"),
        ({"prenorm": True}, "bias of shape None, .*, prenorm = True: expected None, None, False"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_gated_norm_refuses_arguments_that_it_does_not_apply(arguments: dict[str, Any], error: str) -> None:
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match=f"^{error}$"):
        delta.gated_norm(x, x, torch.ones(2), **{"bias": None, **arguments})


def test_a_convolution_refuses_another_activation() -> None:
    x, pool, slots = torch.ones(1, 2), torch.zeros(1, 2, 3), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^activation = None: expected 'silu' or 'swish'$"):
        delta.convolve_next(x, pool, torch.ones(2, 4), None, None, conv_state_indices=slots)
