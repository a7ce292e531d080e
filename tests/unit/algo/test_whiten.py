"""Whitening, where eps is large enough to be seen: on the side of the deviation that makes values smaller."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algo.advantages import whiten
from rlsys.algo.registry import build
from tests.helpers.algo_world import packed, table


@pytest.mark.parametrize("eps", [0.0, 0.5, 3.0])
def test_eps_is_added_to_the_deviation_of_samples(eps: float) -> None:
    """1 and 3: mean 2, deviation sqrt 2 with n - 1."""
    expected = 1 / (math.sqrt(2) + eps)
    assert whiten(torch.tensor([1.0, 3.0]), eps).tolist() == pytest.approx([-expected, expected])


@pytest.mark.parametrize("eps", [0.0, 0.5, 3.0])
def test_eps_is_added_to_the_deviation_of_tokens(eps: float) -> None:
    """Rewards 1 on one token, 0 on three: mean 1/4, deviation 1/2."""
    method, samples = build("advantage", "reinforce_pp", eps=eps), table([1, 0], [0, 0], [1, 3])
    (advantages,) = method.per_token(method(samples), samples, [packed([1, 3])], lambda values: values)
    assert advantages.tolist() == pytest.approx([0.75 / (0.5 + eps), *[-0.25 / (0.5 + eps)] * 3])
