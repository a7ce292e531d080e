"""GAE by turn, with lambdas of a length and of the critic, against numbers by hand in float64."""

from __future__ import annotations

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch
from rlsys.algo.methods.gae import gae
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import single_rank
from tests.helpers.algo_world import DOUBLE, World, packed, run, section, table

close = torch.testing.assert_close


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def estimate(part: Batch, rewards: list[float], **params: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of one packed batch, without whitening."""
    method = build("advantage", "gae", whiten=False, **params)
    samples = table(rewards, list(range(len(rewards))), part.lengths.long().tolist())
    (advantages,) = method.per_token(method(samples), samples, [part], single_rank)
    return advantages, part.signal("returns")


def test_a_turn_is_one_timestep_by_hand() -> None:
    """Two turns of two tokens around a tool's answer; V = 1 and 3 where they begin, reward 4, gamma 1/2, lambda 1/2.
    delta = 0 + 3/2 - 1, 4 - 3; A = 1/2 + 1/4, 1; G = 1.75, 4."""
    part = packed([5], values=[1.0, 50.0, 99.0, 3.0, 70.0], mask=[1.0, 1.0, 0.0, 1.0, 1.0])
    advantages, returns = estimate(part, [4.0], timestep="turn", gamma=0.5, lam=0.5)
    close(advantages, vector(0.75, 0.75, 0, 1, 1))
    close(returns, vector(1.75, 1.75, 0, 4, 4))


def test_a_turn_ends_with_its_sequence() -> None:
    """Two sequences behind each other are two turns, and a masked end is none."""
    part = packed([2, 2], values=[1.0, 9.0, 2.0, 9.0], mask=[1.0, 1.0, 1.0, 0.0])
    advantages, returns = estimate(part, [5.0, 7.0], timestep="turn")
    close(advantages, vector(4, 4, 5, 0))
    close(returns, vector(5, 5, 7, 0))


def test_turns_of_one_token_are_tokens() -> None:
    part = packed([5], values=[1.0, 0.0, 2.0, 0.0, 3.0], mask=[1.0, 0.0, 1.0, 0.0, 1.0])
    for params in ({}, {"alpha": 0.7}, {"critic_lam": 1.0}):
        by_turn, by_token = (
            estimate(part, [2.0], timestep=unit, gamma=0.9, **params) for unit in ("turn", "token")
        )
        close(by_turn, by_token)


def test_lambda_grows_with_the_response_by_hand() -> None:
    """alpha 1/2: lambda = 1 - 2 / l, so 0 at one token and two, 1/3 at three, 1/2 at four tokens, of which a tool
    wrote none."""
    lengths, lam = [1, 2, 3, 5], [0.0, 0.0, 1 / 3, 0.5]
    mask = [1.0] * 6 + [1.0, 1.0, 0.0, 1.0, 1.0]
    values = torch.linspace(-1, 1, 11, dtype=DOUBLE).tolist()
    part = packed(lengths, values=values, mask=mask)
    advantages, returns = estimate(part, [1.0, 2.0, 3.0, 4.0], alpha=0.5, gamma=0.9)
    starts = [0, 1, 3, 6]
    for start, length, each, reward in zip(starts, lengths, lam, [1.0, 2.0, 3.0, 4.0], strict=True):
        positions = torch.arange(start, start + length)
        positions = positions[part.mask[positions] > 0]
        rewards = torch.zeros(len(positions), dtype=DOUBLE)
        rewards[-1] = reward
        expected = gae(
            rewards, part.signal("values")[positions], torch.zeros(len(positions)).long(), 0.9, each
        )
        close(advantages[positions], expected)
        close(returns[positions], expected + part.signal("values")[positions])


def test_a_critic_with_lambda_one_learns_the_plain_return() -> None:
    """Whatever lambda the advantages have, and whatever it said before."""
    part = packed([3, 2], values=[5.0, -2.0, 1.0, 0.5, 3.0])
    plain, _ = estimate(part, [2.0, 4.0], lam=0.3)
    advantages, returns = estimate(part, [2.0, 4.0], lam=0.3, critic_lam=1.0)
    close(advantages, plain)
    close(returns, vector(2, 2, 2, 4, 4))


def test_positive_nll_by_hand() -> None:
    """Three responses of 1, 2, 3 tokens, the first and the last are correct. The update's loss is coefficient times
    the mean of -logp over the four tokens of these, whatever the others and their advantages are."""
    samples = table([1, 0, 1], [0, 0, 0], [1, 2, 3])
    objective = Objective(section(loss=["clip", {"name": "positive_nll", "coefficient": 0.5}]))
    plain = Objective(section(loss=["clip"]))
    logp = vector(-1, -2, -3, -4, -5, -6)
    losses = []
    for variant in (objective, plain):
        plan, part = variant.plan(samples), packed([1, 2, 3], mu=logp.tolist())
        plan.rows = [0, 1, 2]
        variant.finish(plan, [part])
        variant.prepare([part])
        losses.append(variant(logp, part)[0] / plan.denominator)
    close(losses[0] - losses[1], vector(0.5 * (1 + 4 + 5 + 6) / 4)[0])


@pytest.mark.parametrize("reducer", ["sequence_mean", {"name": "token_mean", "over": "active"}])
def test_positive_nll_is_a_mean_under_every_reducer(reducer: object) -> None:
    """Of a constant -logp it is coefficient times that constant; without a correct response it is 0."""
    for rewards, expected in (([1.0, 0.0, 1.0, 1.0], 0.1 * 3), ([0.0, 0.0, 0.0, 0.0], 0.0)):
        samples = table(rewards, [0, 0, 1, 1], [1, 2, 3, 4])
        objective = Objective(section(loss=["clip", "positive_nll"], reducer=reducer))
        plan, part = objective.plan(samples), packed([1, 2, 3, 4], mu=[-3.0] * 10)
        objective.finish(plan, [part])
        part.advantages = torch.zeros(10, dtype=DOUBLE)
        objective.prepare([part])
        total, _ = objective(torch.full((10,), -3.0, dtype=DOUBLE), part)
        close(total / plan.denominator, vector(expected)[0])


def test_positive_nll_has_its_own_mean_in_each_update() -> None:
    """Two updates a step: each is divided by its half of the denominator, and its mean is over its own tokens."""
    world = World()
    for sequence in world.sequences:
        sequence["logp"] = torch.full_like(sequence["logp"], -3.0)
    imitated, plain = (
        run(world, section(loss=["clip", term], minibatches=2), lambda rows: [rows])
        for term in ({"name": "positive_nll", "coefficient": 1.0}, {"name": "entropy", "coefficient": 0.0})
    )
    gradients = [sum(g[0].sum() for g in outcome.gradients.values()) for outcome in (imitated, plain)]
    close(gradients[0] - gradients[1], vector(-2.0)[0])  # -1 a token, the mean of each of the two updates
