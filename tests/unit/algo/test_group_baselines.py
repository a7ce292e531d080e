"""Baselines and scales of group rewards: numbers by hand in float64, and what holds for all of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Samples
from rlsys.algo.objective import Objective
from rlsys.config import load_config
from rlsys.config.algo import AlgoSection
from tests.helpers.algo_world import DOUBLE, table

close = torch.testing.assert_close
METHODS = ("lite_ppo", "maxrl", "opo", "grpo_passk", "gpg")


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def test_lite_ppo_by_hand() -> None:
    """Rewards 0, 2 | 1, 5: mean 2, squares 4, 0, 1, 9, over 3; less the groups' means 1 and 3: -1, 1, -2, 2."""
    advantages = build("advantage", "lite_ppo", eps=0.0)(table([0, 2, 1, 5], [0, 0, 1, 1]))
    close(advantages, vector(-1, 1, -2, 2) / math.sqrt(14 / 3))


def test_maxrl_by_hand() -> None:
    """One success of four: (1 - 1/4) / (1/4) = 3, the others -1. No success: no signal. A negative mean: none."""
    rewards, groups = [1, 0, 0, 0, 0, 0, -3, 1], [0, 0, 0, 0, 1, 1, 2, 2]
    close(build("advantage", "maxrl")(table(rewards, groups)), vector(3, -1, -1, -1, 0, 0, 0, 0))


def test_opo_by_hand() -> None:
    """Lengths 1 and 3, rewards 1 and 0: b = 1/4. Equal lengths: the mean."""
    advantages = build("advantage", "opo")(table([1, 0, 4, 2], [0, 0, 1, 1], [1, 3, 5, 5]))
    close(advantages, vector(0.75, -0.25, 1, -1))


def test_pass_at_k_by_hand() -> None:
    """5 leads 3 by 2; std of 5, 3, 1 is 2. A tie at the top, and a lone sample, have no lead."""
    samples = table([3, 5, 1, 1, 1, 0, 7], [0, 0, 0, 1, 1, 1, 2])
    close(build("advantage", "grpo_passk", eps=0.0, scale=False)(samples), vector(0, 2, 0, 0, 0, 0, 0))
    close(build("advantage", "grpo_passk")(samples), vector(0, 2 / (2 + 1e-6), 0, 0, 0, 0, 0))


def test_gpg_by_hand() -> None:
    """Three of eight are rewarded: alpha = 8/3; four are of the one mixed group, of mean 1/4: alpha = 2."""
    samples = table([1, 0, 0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 1, 1, 2, 2])
    centred = vector(0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0)
    close(build("advantage", "gpg", counts="rewarded")(samples), centred * 8 / 3)
    close(build("advantage", "gpg")(samples), centred * 8 / 4)
    close(build("advantage", "gpg", counts="mixed", f_norm=4.0)(samples), centred * 2 / 4)


@pytest.mark.parametrize("name", [*METHODS, "gdpo", "vcpo"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_groups_of_equal_rewards_get_exactly_zero(name: str, dtype: torch.dtype) -> None:
    """Also where other groups differ, and where 0.1 and 0.7 have no exact sum."""
    size, groups = 7, 5
    generator = torch.Generator().manual_seed(0)
    kinds = 2 if name == "gdpo" else 1
    rewards = torch.rand(size * groups, kinds, generator=generator, dtype=dtype)
    equal = torch.arange(size * groups) >= 2 * size
    rewards[equal] = torch.tensor([0.1, 0.7][:kinds], dtype=dtype)
    lengths = torch.randint(1, 50, (len(rewards),), generator=generator)
    log_weight = torch.randn(len(rewards), generator=generator, dtype=DOUBLE)
    samples = Samples(
        rewards=rewards.squeeze(1),
        group_ids=torch.arange(len(rewards)) // size,
        lengths=lengths,
        log_weight=log_weight,
        score_norm=lengths.double(),
    )
    advantages = build("advantage", name)(samples)
    assert advantages.dtype == dtype
    assert (advantages[equal] == 0).all()
    assert (advantages[~equal] != 0).any()


def test_gdpo_packs_no_sample_of_a_group_of_equal_rewards() -> None:
    """Float noise made them active: packed, counted by `over: active`, and in M2PO's biting set."""
    rewards = torch.zeros(64, 2)
    rewards[:32] = torch.rand(32, 2, generator=torch.Generator().manual_seed(3)).round()
    samples = Samples(rewards=rewards, group_ids=torch.arange(64) // 8, lengths=torch.full((64,), 5))
    plan = Objective(AlgoSection.model_validate({"advantage": "gdpo"})).plan(samples)
    assert max(plan.rows) < 32


@pytest.mark.parametrize("name", ["sapo", "vcpo", "vcpo_baseline"])
def test_recipes_with_equal_sequence_weights_use_the_sequence_mean(name: str) -> None:
    """verl's and TRL's SAPO and the authors' VCPO scripts: the mean over a sequence's tokens, then over sequences."""
    path = Path(__file__).resolve().parents[3] / "configs/algorithms" / f"{name}.yaml"
    reducer = Objective(load_config(path).algo).reducer
    lengths = torch.tensor([1, 4])
    assert reducer(lengths, torch.ones(2, dtype=torch.bool)).factor.tolist() == [1.0, 0.25]
