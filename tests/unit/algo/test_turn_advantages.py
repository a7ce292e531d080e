"""Returns and advantages of turns: by hand, against the authors' numbers, and as their batch forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlsys.algo import build
from rlsys.algo.advantages import grpo, whiten
from rlsys.algo.methods.gae import Gae
from rlsys.algo.methods.mapo import mapo
from rlsys.algo.methods.ui_s1 import ui_s1
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import single_rank
from rlsys.algo.turn_advantages import turn_returns
from rlsys.core.errors import UserError
from rlsys.core.spans import TurnReward, VersionSpan
from rlsys.core.types import Sample, SampleGroup, Segment, Status
from rlsys.trainer.pack import TrainSample, pack
from rlsys.trainer.step import sample_table
from tests.helpers.algo_world import DOUBLE, packed, section, table

AUTHORS = Path(__file__).resolve().parents[2] / "data/peers/ui_s1.json"


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def test_turn_returns_restart_at_unmatched_turns() -> None:
    rewards = rows([1.0, 2.0, 4.0], [1.0, 2.0, 0.0])
    assert turn_returns(rewards, 0.5).tolist() == [[3.0, 4.0, 4.0], [2.0, 2.0, 0.0]]
    matched = torch.tensor([[True, False, True], [True, True, True]])
    assert turn_returns(rewards, 0.5, matched).tolist() == [[1.0, 2.0, 4.0], [2.0, 2.0, 0.0]]


def test_mapo_by_hand() -> None:
    """Returns [3, 2], [1] and [1, 1]: turn 1 has mean 5/3, turn 2 mean 1.5; the batch has mean 1.6."""
    rewards, counts = rows([1.0, 2.0], [1.0, 0.0], [0.0, 1.0]), torch.tensor([2, 1, 2])
    advantages = mapo(rewards, counts, torch.zeros(3), gamma=1.0, weight=0.5, eps=0.0)
    first = torch.tensor([3.0, 1.0, 1.0], dtype=DOUBLE)
    second = torch.tensor([2.0, 1.0], dtype=DOUBLE)
    every = torch.tensor([3.0, 2.0, 1.0, 1.0, 1.0], dtype=DOUBLE)
    turn1, turn2 = (first - 5 / 3) / first.std(), (second - 1.5) / second.std()
    batch = (every - 1.6) / every.std()
    hand = rows(
        [float(turn1[0] + batch[0]) / 2, float(turn2[0] + batch[1]) / 2],
        [float(turn1[1] + batch[2]) / 2, 0.0],
        [float(turn1[2] + batch[3]) / 2, float(turn2[1] + batch[4]) / 2],
    )
    assert torch.allclose(advantages, hand, atol=1e-12)


def test_mapo_with_one_turn_is_its_batch_form() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(12, generator=g, dtype=DOUBLE), torch.arange(12) // 4
    advantages = mapo(rewards[:, None], torch.ones(12, dtype=torch.long), groups, gamma=0.9, weight=0.3)
    assert torch.allclose(advantages[:, 0], 0.3 * grpo(rewards, groups) + 0.7 * whiten(rewards), atol=1e-12)


@pytest.mark.parametrize("case", range(6))
def test_ui_s1_equals_the_authors_function_on_random_trajectories(case: int) -> None:
    """Their numbers (X-PLUG/MobileAgent, UI-S1/uis1/core_uis1.py) on trajectories that are in the file, too."""
    reference = json.loads(AUTHORS.read_text())[case]
    counts = torch.tensor(reference["counts"])
    advantages = ui_s1(
        torch.tensor(reference["scores"], dtype=DOUBLE),
        torch.tensor(reference["rewards"], dtype=DOUBLE),
        torch.tensor(reference["matches"]),
        counts,
        torch.tensor(reference["groups"]),
        gamma=reference["gamma"],
        episode_weight=reference["episode_weight"],
        step_weight=reference["step_weight"],
        std=reference["std"],
    )
    turn_mask = torch.arange(advantages.shape[1])[None] < counts[:, None]
    expected = torch.tensor(reference["advantages"], dtype=DOUBLE)
    assert len(set(reference["counts"])) > 1 and not torch.tensor(reference["matches"])[turn_mask].all()
    assert torch.allclose(advantages[turn_mask], expected, atol=2e-5), (
        (advantages[turn_mask] - expected).abs().max()
    )
    assert not advantages[~turn_mask].any()


def test_each_token_has_its_turns_advantage_and_observations_have_none() -> None:
    algo = section(advantage={"name": "mapo", "weight": 1.0}, loss=["clip"])
    objective = Objective(algo)
    samples = table(
        [3.0, 1.0], [0, 0], [3, 2],
        turn_rewards=rows([1.0, 2.0], [1.0, 0.0]),
        turn_matches=torch.ones((2, 2), dtype=torch.bool),
        turn_counts=torch.tensor([2, 1]),
    )  # fmt: skip
    part = packed([4, 3], mask=[1, 0, 1, 1, 0, 1, 1])
    part.turns = torch.tensor([0, -1, 1, 1, -1, 0, 0])
    plan = objective.plan(samples)
    objective.finish(plan, [part])
    assert part.advantages is not None
    half = 2**-0.5  # of returns 3 and 1; the second turn is alone
    assert part.advantages.tolist() == pytest.approx([half, 0, 0, 0, 0, -half, -half], abs=1e-6)


def test_gae_rewards_each_turn_on_its_last_token_by_hand() -> None:
    """Two turns with rewards 1 and 2 and values 0.5 and 1: lambda 1 gives 2.5 and 1, lambda 0 gives 1.5 and 1."""
    part = packed([4], values=[0.5, 9.0, 1.0, 9.0], mask=[1, 0, 1, 1])
    part.turns = torch.tensor([0, -1, 1, 1])
    samples = table(
        [3.0], [0], [3],
        turn_rewards=rows([1.0, 2.0]), turn_matches=torch.ones((1, 2), dtype=torch.bool),
        turn_counts=torch.tensor([2]),
    )  # fmt: skip
    for lam, hand in ((1.0, [2.5, 0.0, 1.0, 1.0]), (0.0, [1.5, 0.0, 1.0, 1.0])):
        advantage: Gae = build("advantage", "gae", timestep="turn", rewards="turns", lam=lam, whiten=False)
        (advantages,) = advantage.per_token(samples.reward, samples, [part], single_rank)
        assert advantages.tolist() == pytest.approx(hand)
    outcome_gae: Gae = build("advantage", "gae", timestep="turn", lam=0.0, whiten=False)
    (advantages,) = outcome_gae.per_token(samples.reward, samples, [part], single_rank)
    assert advantages.tolist() == pytest.approx([0.5, 0.0, 2.0, 2.0]), "all of the reward at the end"


def played(number: int, marks: list[TurnReward] | None) -> Sample:
    """Two turns of two tokens, with one that was told between them."""
    sample = Sample(number, 0, number, [1, 2], seed=0, status=Status.FINISHED, reward=1.0)
    sample.append(Segment([5, 6], [-1.0, -1.0], [VersionSpan(1, 0, 2)]))
    sample.observe([7])
    sample.append(Segment([8, 9], [-1.0, -1.0], [VersionSpan(1, 0, 2)]))
    sample.turn_rewards = marks
    return sample


def test_the_trainer_assigns_each_token_its_turn_and_each_turn_its_reward() -> None:
    group = SampleGroup(
        0, 0, [played(0, [TurnReward(1.0), TurnReward(0.5, False)]), played(1, [TurnReward(0.0)] * 2)]
    )
    samples = sample_table([group], 1, {"turn_rewards"})
    assert samples.column("turn_rewards").tolist() == [[1.0, 0.5], [0.0, 0.0]]
    assert samples.column("turn_matches").tolist() == [[True, False], [True, True]]
    assert samples.column("turn_counts").tolist() == [2, 2]
    (batch,) = pack(
        [TrainSample.of(group.samples[0], 0), TrainSample.of(played(1, None), 1, first_turn=3)], 64
    )
    assert batch.turns is not None
    assert sorted(batch.turns.tolist()) == sorted([-1, -1, 0, 0, -1, 1, 1, -1, -1, 3, 3, -1, 4, 4])
    with pytest.raises(UserError, match="sample 1 has no rewards of its turns, which a plug-in needs"):
        sample_table([SampleGroup(0, 0, [played(1, None)])], 1, {"turn_rewards"})


def test_turn_advantages_reject_plugins_without_turn_support() -> None:
    with pytest.raises(UserError, match="mapo uses the rewards of turns, which overlong does not"):
        Objective(section(advantage="mapo", shaping=["overlong"], loss=["clip"]))
