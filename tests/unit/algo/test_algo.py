"""Advantages and losses against numbers worked out by hand."""

import math

import pytest
import torch

from rlsys.algo.advantages import dr_grpo, grpo
from rlsys.algo.losses import clipped_surrogate, gradient_is_clipped


def test_grpo_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([7, 7, 7, 7, 3, 3])
    # group 7: mean 1/4, squares (9+1+1+1)/16 = 3/4, variance over n-1 = 1/4, std 1/2
    out = grpo(rewards, groups, eps=0.0 + 1e-12)
    torch.testing.assert_close(out, torch.tensor([1.5, -0.5, -0.5, -0.5, 0.0, 0.0]))


def test_grpo_ignores_shift_and_scale_and_order() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(24, generator=g, dtype=torch.float64), torch.arange(24) % 6
    base = grpo(rewards, groups)
    torch.testing.assert_close(grpo(3 * rewards + 5, groups), base, rtol=1e-5, atol=1e-5)
    order = torch.randperm(24, generator=g)
    torch.testing.assert_close(grpo(rewards[order], groups[order]), base[order])


def test_dr_grpo_by_hand() -> None:
    torch.testing.assert_close(
        dr_grpo(torch.tensor([2.0, 0.0, 1.0]), torch.tensor([0, 0, 0])), torch.tensor([1.0, -1.0, 0.0])
    )


def test_advantages_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        grpo(torch.zeros(2), torch.zeros(3))


def test_clip_by_hand() -> None:
    """Four tokens: ratio 2 with A>0 (clipped at 1.28), 2 with A<0 (not), 0.5 with A<0 (clipped at 0.8), 1."""
    logp = torch.tensor([math.log(2), math.log(2), math.log(0.5), 0.0], requires_grad=True)
    adv = torch.tensor([1.0, -1.0, -1.0, 3.0])
    loss = clipped_surrogate(logp.exp(), adv, 0.8, 1.28).sum()
    torch.testing.assert_close(loss.detach(), torch.tensor(-1.28 + 2.0 + 0.8 - 3.0))
    assert gradient_is_clipped(logp.exp(), adv, 0.8, 1.28).tolist() == [True, False, True, False]
    loss.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, 2.0, 0.0, -3.0]))
