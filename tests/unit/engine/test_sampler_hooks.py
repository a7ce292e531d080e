"""The draw of seeded samples: what is kept, and that a row is a function of itself alone."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.engine.cpu.hooks import murmur_hash32
from rlsys.engine.hooks.sampler_hooks import draw_by_token_id, truncate

ALL = 1 << 30
"""SGLang's TOP_K_ALL: every id."""


def kept(probs: list[float], top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    row = truncate(torch.tensor([probs]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return [round(p, 6) for p in row[0].tolist()]


def test_truncation_matches_values_computed_by_hand() -> None:
    probs = [0.1, 0.4, 0.05, 0.25, 0.2]
    assert kept(probs) == probs
    assert kept(probs, top_k=2) == [0, 0.4, 0, 0.25, 0]
    assert kept(probs, top_k=1) == [0, 0.4, 0, 0, 0]
    # 0.4 lies before 0.25, 0.65 before 0.2, 0.85 before 0.1.
    assert kept(probs, top_p=0.5) == [0, 0.4, 0, 0.25, 0]
    assert kept(probs, top_p=0.7) == [0, 0.4, 0, 0.25, 0.2]
    assert kept(probs, top_p=0.01) == [0, 0.4, 0, 0, 0]
    assert kept(probs, min_p=0.45) == [0, 0.4, 0, 0.25, 0.2]
    assert kept(probs, top_k=3, top_p=0.9, min_p=0.55) == [0, 0.4, 0, 0.25, 0]


def test_truncation_keeps_the_lower_ids_of_equal_probabilities() -> None:
    assert kept([0.2, 0.3, 0.2, 0.3], top_k=1) == [0, 0.3, 0, 0]
    assert kept([0.2, 0.3, 0.2, 0.3], top_k=3) == [0.2, 0.3, 0, 0.3]


def test_a_row_without_truncation_has_no_rounding_loss() -> None:
    """A float32 sum over a large vocabulary exceeds 1 before its end."""
    probs = torch.rand(1, 50_000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    every = truncate(probs, torch.tensor([ALL]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert torch.equal(every, probs)


@pytest.fixture(scope="module")
def sglang_sampler() -> Any:
    """SGLang's module, with the hash that cpu/hooks.py puts into it."""
    module = importlib.import_module("sglang.srt.layers.sampler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "murmur_hash32", murmur_hash32)
        yield module


def info_of(top_ks: list[int], top_ps: list[float], min_ps: list[float], masks: Tensor | None = None) -> Any:
    rows = len(top_ks)
    return SimpleNamespace(
        sampling_seed=torch.arange(rows) + 11,
        top_ks=torch.tensor(top_ks),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
        sampling_mask_batch_indices=masks,
    )


def refuse(*args: Any) -> Any:
    raise AssertionError("SGLang's own draw")


@pytest.mark.gate
def test_an_untruncated_row_draws_the_token_of_sglangs_sampler(
    sglang_sampler: Any,
) -> None:
    probs = torch.randn(64, 151, generator=torch.Generator().manual_seed(1)).softmax(-1)
    positions = torch.arange(64) * 3
    info = info_of([ALL] * 63 + [1], [1.0] * 64, [0.0] * 64)
    expected = sglang_sampler.sampling_from_probs_torch(probs, info.sampling_seed, positions)
    drawn_tokens, capture = draw_by_token_id(refuse, None, probs.clone(), info, positions, False)
    assert capture is None and drawn_tokens.dtype == torch.int32
    assert torch.equal(drawn_tokens[:-1], expected[:-1])
    assert int(drawn_tokens[-1]) == int(probs[-1].argmax())


@pytest.mark.gate
def test_sampled_tokens_are_independent_of_the_batch(sglang_sampler: Any) -> None:
    probs = torch.randn(6, 151, generator=torch.Generator().manual_seed(2)).softmax(-1)
    limits = [ALL, 1, 9, ALL, ALL, 30], [1.0, 1.0, 1.0, 0.8, 1.0, 0.9], [0.0, 0.0, 0.0, 0.0, 0.1, 0.01]
    info, positions = info_of(*limits), torch.tensor([3, 3, 90, 4, 4, 5])
    together, _ = draw_by_token_id(refuse, None, probs, info, positions, False)
    for i in range(6):
        row_info = SimpleNamespace(
            **{name: None if value is None else value[i : i + 1] for name, value in vars(info).items()}
        )
        drawn, _ = draw_by_token_id(refuse, None, probs[i : i + 1], row_info, positions[i : i + 1], False)
        assert int(drawn) == int(together[i])


@pytest.mark.gate
def test_the_sampler_captures_the_support_of_requesting_rows(sglang_sampler: Any) -> None:
    probs = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]]).repeat(3, 1)
    info = info_of([ALL, 2, 3], [1.0] * 3, [0.0] * 3, torch.tensor([1, 2]))
    drawn, capture = draw_by_token_id(refuse, None, probs, info, torch.tensor([0, 1, 2]), False)
    assert capture.weights.tolist() == [
        pytest.approx([0, 0.4, 0, 0.25, 0]),
        pytest.approx([0, 0.4, 0, 0.25, 0.2]),
    ]
    assert capture.selected_weight.tolist() == [float(probs[i, drawn[i]]) for i in (1, 2)]
    assert capture.token_ids is None and capture.batch_rows.tolist() == [1, 2]


def test_an_engine_without_seeds_draws_as_before() -> None:
    info = SimpleNamespace(sampling_seed=None)
    answer = draw_by_token_id(lambda *args: args, "sampler", "probs", info, "positions", False)  # type: ignore[arg-type]
    assert answer == ("sampler", "probs", info, "positions", False)
