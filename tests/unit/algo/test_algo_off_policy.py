"""Losses made for stale samples against numbers worked out by hand: DPPO, TOPR, DRO, Kimi, VESPO, LUSPO, GMPO."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch
from rlsys.algo.losses import View
from rlsys.algo.methods.dppo import binary_kl
from rlsys.algo.objective import Objective
from tests.helpers.algo_world import DOUBLE, World, packed, run, section, table

close = torch.testing.assert_close
LOG2 = math.log(2)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def losses(
    name: str, batch: Batch, logp: torch.Tensor, **params: object
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(token losses, gradient of their sum, sums of the figures); the anchor is mu."""
    leaf = logp.clone().requires_grad_()
    loss, figures = build("loss", name, **params)(View(batch, leaf, batch.mu), None)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, {k: float(batch.masked(v).sum()) for k, v in figures.items()}


def probabilities(*values: float) -> list[float]:
    return [math.log(v) for v in values]


def test_dppo_bounds_probabilities_not_ratios() -> None:
    """0.01 -> 0.1 has a ratio of 10 and moves by 0.09: free. 0.5 -> 0.7 has 1.4 and moves by 0.2: held, where A > 0.
    0.7 -> 0.5 is held where A < 0 and free where A > 0."""
    batch = packed([4], mu=probabilities(0.01, 0.5, 0.7, 0.7), advantages=[1, 1, -1, 1])
    loss, grad, sums = losses("dppo", batch, vector(*probabilities(0.1, 0.7, 0.5, 0.5)))
    close(grad, vector(-10, 0, 0, -5 / 7))
    close(loss, grad * vector(*probabilities(0.1, 0.7, 0.5, 0.5)))
    assert sums == {"clipped": 2, "capped_share": 0}
    assert losses("clip", batch, vector(*probabilities(0.1, 0.7, 0.5, 0.5)))[1][0] == 0


def test_dppo_caps_its_weight_and_keeps_the_gradient() -> None:
    batch = packed([1], mu=probabilities(0.001), advantages=[1.0])
    _, grad, sums = losses("dppo", batch, vector(*probabilities(0.1)))
    close(grad, vector(-20))
    assert sums == {"clipped": 0, "capped_share": 1}


def test_dppo_by_kl_between_a_token_and_all_others() -> None:
    """0.5 -> 0.25: 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.1438. Only the move that the advantage wants is bounded."""
    close(
        binary_kl(vector(math.log(0.5)), vector(math.log(0.25))),
        vector(0.14384103622589042),
        atol=1e-7,
        rtol=0,
    )
    batch = packed([2], mu=probabilities(0.5, 0.5), advantages=[-1, 1])
    logp = vector(*probabilities(0.25, 0.25))
    close(losses("dppo", batch, logp, divergence="kl", low=0.14, high=0.14)[1], vector(0, -0.5))
    close(losses("dppo", batch, logp, divergence="kl", low=0.15, high=0.15)[1], vector(0.5, -0.5))


def test_topr_by_hand() -> None:
    """Ratios 2 and 4 in one response, 1/2 and 2 in another. Bad: min(8, 1), min(1, 1); good: 1."""
    batch = packed([2, 2, 1], advantages=[-1, -1, -1, -1, 3])
    logp = vector(LOG2, 2 * LOG2, -LOG2, LOG2, -5)
    _, grad, sums = losses("topr", batch, logp)
    close(grad, vector(1, 1, 1, 1, -3))
    assert sums == {"capped_share": 2}
    close(losses("topr", batch, logp, level="token")[1], vector(1, 1, 0.5, 1, -3))
    close(losses("topr", packed([2], advantages=[-1, -1]), vector(-LOG2, -LOG2))[1], vector(0.25, 0.25))


def test_topr_counts_no_rounding_as_capped() -> None:
    for noise in (1e-6, -1e-6):
        assert losses("topr", packed([1], advantages=[-1]), vector(noise))[2] == {"capped_share": 0}


def test_dro_and_kimi_by_hand() -> None:
    """-A logp + 0.2 / 2 d^2 with d = 2: gradient -A + 0.4."""
    batch = packed([2], mu=[-3.0, -1.0], advantages=[1.0, 0.0])
    loss, grad, _ = losses("dro", batch, vector(-1, 1), beta=0.2)
    close(loss, vector(1.4, 0.4))
    close(grad, vector(-0.6, 0.4))
    loss, grad, _ = losses("kimi", batch, vector(-1, 1), tau=0.2)
    close(loss, vector(0.4, 0.4))
    close(grad, vector(0.4, 0.4))


@pytest.mark.parametrize("loss", [["dro"], ["reinforce", "kimi"]])
def test_the_square_holds_samples_of_advantage_zero(loss: list[str]) -> None:
    plan = Objective(section(loss=loss)).plan(table([1, 0, 1, 1], [0, 0, 1, 1]))
    assert plan.rows == [0, 1, 2, 3]


def test_dro_is_reinforce_with_kimis_penalty() -> None:
    world = World()
    dro_outcome = run(world, section(loss=[{"name": "dro", "beta": 0.3}]), lambda rows: [rows])
    kimi_outcome = run(world, section(loss=["reinforce", {"name": "kimi", "tau": 0.3}]), lambda rows: [rows])
    assert dro_outcome.loss == pytest.approx(kimi_outcome.loss)


def test_kimi_penalty_with_reinforce_uses_the_configured_anchor() -> None:
    """The policy term has no ratio; the penalty has, so the anchor is looked at: d = 2, gradient -A + 0.2 d."""
    objective = Objective(section(loss=["reinforce", {"name": "kimi", "tau": 0.2}], anchor="old"))
    batch = packed([1], mu=[-1.0], old=[-3.0], advantages=[1.0], weight=[1.0])
    logp = vector(-1).requires_grad_()
    objective(logp, batch)[0].backward()
    assert logp.grad is not None
    close(logp.grad, vector(-0.6))


def phi(w: float, k: float, lam: float) -> float:
    return math.exp(lam * (1 - w)) * w**k


def test_vespo_by_hand() -> None:
    """w = 2 x 2 = 4 of a response with A > 0, 1/2 of one with A < 0; 1 where nothing moved."""
    batch = packed([2, 1, 1], advantages=[1, 1, -1, 2])
    logp = vector(LOG2, LOG2, -LOG2, 0)
    loss, grad, sums = losses("vespo", batch, logp)
    close(grad, vector(-phi(4, 2, 3), -phi(4, 2, 3), phi(0.5, 3, 2), -2))
    close(loss, grad * logp)
    assert sums["clipped"] == 0


def test_a_response_far_away_has_no_gradient_under_vespo_and_is_counted() -> None:
    batch = packed([2, 2], advantages=[1, 1, -1, -1])
    loss, grad, sums = losses("vespo", batch, vector(20, 20, -20, -20))
    assert torch.isfinite(loss).all() and grad[:2].eq(0).all() and grad[2:].abs().max() < 1e-20
    assert sums["clipped"] == 2


def test_luspo_gives_each_token_the_whole_sequence_ratio() -> None:
    """Under the sequence mean GSPO's tokens have s A / |y|, LUSPO's s A: s = e^0.2, |y| = 2."""
    for name, expected in (("gspo", math.exp(0.2) / 2), ("luspo", math.exp(0.2))):
        objective = Objective(
            section(loss=[{"name": name, "clip_high": 1.0}], advantage="dr_grpo", reducer="sequence_mean")
        )
        plan, batch = objective.plan(table([1, 0], [0, 0], [2, 1])), packed([2, 1])
        objective.finish(plan, [batch])
        logp = vector(0.1, 0.3, 0).requires_grad_()
        (objective(logp, batch)[0] / plan.denominator).backward()
        assert logp.grad is not None
        close(logp.grad[:2], -0.5 * expected / 2 * vector(1, 1))  # A = 1/2, two responses


def test_gmpo_by_hand() -> None:
    """Log-ratios 0.2, 0.7 with A > 0: the second counts 0.4 and has no gradient; s = e^0.3. With A < 0 it is free."""
    loss, grad, sums = losses("gmpo", packed([2], advantages=[1, 1]), vector(0.2, 0.7))
    close(loss, vector(-1, -1) * math.exp(0.3))
    close(grad, vector(-1, 0) * math.exp(0.3))
    assert sums["clipped"] == 1
    _, grad, sums = losses("gmpo", packed([2], advantages=[-1, -1]), vector(0.2, 0.7))
    close(grad, vector(1, 1) * math.exp(0.45))
    _, grad, sums = losses("gmpo", packed([2], advantages=[-1, -1]), vector(-0.2, -0.7))
    close(grad, vector(1, 0) * math.exp(-0.3))


NAMES = ["dppo", "topr", "dro", "vespo", "gmpo"]


@pytest.mark.parametrize("name", [*NAMES, "luspo"])
def test_at_ratio_one_each_has_the_policy_gradient(name: str) -> None:
    _, grad, _ = losses(name, packed([1] * 3, advantages=[1, -2, 0.5]), vector(0, 0, 0))
    close(grad, vector(-1, 2, -0.5))


@pytest.mark.parametrize("name", [*NAMES, "luspo", "kimi"])
@pytest.mark.parametrize("gap", [50.0, -50.0])
def test_log_ratios_of_fifty_and_masked_nan_stay_finite(name: str, gap: float) -> None:
    batch = packed([3], mu=[-60.0, -60.0, torch.nan], advantages=[1, -1, 1], mask=[1.0, 1.0, 0.0])
    logp = torch.tensor([-60 + gap, -60 + gap, -1], dtype=DOUBLE, requires_grad=True)
    view = View(batch, batch.masked(logp), batch.masked(batch.mu))
    batch.masked(build("loss", name)(view, None)[0]).sum().backward()
    assert logp.grad is not None and torch.isfinite(logp.grad).all() and logp.grad[2] == 0
