"""GPG against its authors' objective (AMAP-ML/GPG, commit e096da8), transcribed in float64.

`open_r1/gpg_trainer.py` (text) and `open_r1/trainer/grpo_trainer.py` of R1-V (images), with `adjust_gd`: advantages
are rewards minus the group's mean; the loss is the mean of -A log p, over tokens in the one and over responses of
their means in the other; it is divided by `inverse_alpha`, the share of groups whose rewards differ. Groups of equal
rewards stay in the batch. While the share is below `min_inverse_alpha`, further batches are sampled; the groups that
differ are kept, and the share is of the first batch's size, at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlsys.algo import build
from rlsys.algo.objective import Objective
from tests.helpers.algo_world import DOUBLE, packed, section, table

SIZE, LONGEST = 4, 9


def authors_loss(
    logp: Sequence[Tensor], rewards: Tensor, mixed_groups: int, groups: int, over_tokens: bool
) -> Tensor:
    """logp: of each response, `[length]`; rewards `[responses]`; mixed_groups: found while sampling."""
    advantages = rewards - rewards.view(-1, SIZE).mean(1).repeat_interleave(SIZE)
    losses = [-row * advantage for row, advantage in zip(logp, advantages, strict=True)]
    if over_tokens:
        loss = torch.cat(losses).sum() / sum(map(len, losses))
    else:
        loss = torch.stack([row.mean() for row in losses]).mean()
    return loss / min(1.0, mixed_groups / groups)


def world(seed: int, groups: int, binary: bool) -> tuple[list[Tensor], Tensor]:
    """Log-probs of responses of odd lengths, and rewards of which some groups are equal; one at least is not."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST, (groups * SIZE,), generator=g).tolist()
    rewards = torch.rand(groups, SIZE, generator=g, dtype=DOUBLE)
    if binary:
        rewards = (rewards > 0.8).to(DOUBLE)
    rewards[torch.rand(groups, generator=g) < 0.4] = float(binary)
    rewards[0] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    logp = [-torch.rand(n, generator=g, dtype=DOUBLE) - 0.1 for n in lengths]
    return logp, rewards.flatten()


def our_loss(logp: Sequence[Tensor], rewards: Tensor, reducer: str) -> tuple[Tensor, Tensor]:
    """The loss of one update of rlsys and its gradient, `[T]`; `mu` is the current policy."""
    objective = Objective(section(advantage="gpg", loss=["reinforce"], reducer=reducer))
    samples = table(rewards.tolist(), [i // SIZE for i in range(len(rewards))], [len(row) for row in logp])
    plan = objective.plan(samples)
    plan.rows = list(range(len(rewards)))
    leaf = torch.cat(list(logp)).requires_grad_()
    batch = packed([len(row) for row in logp], leaf.tolist())
    objective.finish(plan, [batch])
    objective.prepare([batch])
    loss = objective(leaf, batch, None)[0] / plan.denominator
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("binary", [False, True], ids=["graded", "0 or 1"])
@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
def test_loss_and_gradient_are_those_of_the_authors(reducer: str, binary: bool) -> None:
    for seed in range(20):
        logp, rewards = world(seed, groups := 3 + seed % 5, binary)
        mixed = int((rewards.view(-1, SIZE).std(1) > 0).sum())
        leaves = [row.clone().requires_grad_() for row in logp]
        expected = authors_loss(leaves, rewards, mixed, groups, reducer == "token_mean")
        expected.backward()
        loss, gradient = our_loss(logp, rewards, reducer)
        torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=1e-6)
        expected_gradient = torch.cat([row.grad for row in leaves if row.grad is not None])
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


def test_a_batch_that_was_refilled_until_all_groups_differ_has_the_scale_1() -> None:
    """Theirs: the share of mixed groups is of the batch's size and at most 1, whatever was sampled before. Ours: a
    planner drops groups of equal rewards, and the step that is left has B = B - M."""
    rewards = torch.tensor([1, 0, 0, 1, 1, 0, 0, 0], dtype=DOUBLE)
    centred = rewards - torch.tensor([0.5] * 4 + [0.25] * 4, dtype=DOUBLE)
    advantages = build("advantage", "gpg")(table(rewards.tolist(), [0] * 4 + [1] * 4))
    torch.testing.assert_close(advantages, centred)
    logp = [torch.tensor([-1.0], dtype=DOUBLE)] * 8
    loss, _ = our_loss(logp, rewards, "token_mean")
    torch.testing.assert_close(loss, authors_loss(logp, rewards, 3, 2, over_tokens=True))
