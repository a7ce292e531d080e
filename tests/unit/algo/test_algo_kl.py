"""KL to the reference and the entropy bonus: bounds, gradients that are right off-policy, steered weights."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch
from rlsys.algo.figures import loss_metrics
from rlsys.algo.losses import View
from rlsys.algo.objective import Objective
from rlsys.core.errors import UserError
from tests.helpers.algo_world import DOUBLE, packed, section, table

close = torch.testing.assert_close
LOG2 = math.log(2)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def term(batch: Batch, logp: torch.Tensor, name: str = "kl", **params: object) -> tuple[torch.Tensor, ...]:
    """Token losses, gradient of their sum, and the figure `kl`."""
    leaf = logp.clone().requires_grad_()
    loss, figures = build("loss", name, beta=1.0, **params)(View(batch, leaf, batch.mu), None)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, figures["kl"]


def test_one_token_far_from_the_reference_does_not_become_the_gradient() -> None:
    """k3 of 20 nats is 4.9e8: it is cut at 10, as in verl, slime and NeMo-RL, and such a token has no gradient."""
    loss, grad, kl = term(packed([2], ref=[20.0, LOG2]), vector(0, 0))
    close(loss, vector(10, 1 - LOG2))
    close(grad, vector(0, -1))  # 1 - exp(ref - logp)
    close(kl, loss)


def test_the_bound_is_a_parameter() -> None:
    batch = packed([1], ref=[3.0])
    close(term(batch, vector(0), cap=2.0)[0], vector(2))
    close(term(batch, vector(0), cap=None)[0], vector(math.exp(3) - 4))
    with pytest.raises(UserError, match=r"cap = 0"):
        build("loss", "kl", cap=0)


def test_kl_in_the_reward_has_the_same_bound() -> None:
    algo = section(shaping=[{"name": "kl_reward", "beta": 1.0, "kind": "k3"}], advantage="dr_grpo")
    objective = Objective(algo)
    plan = objective.plan(table([0, 0], [0, 0]))
    objective.finish(plan, [packed([1, 1], old=[0.0, 0.0], ref=[20.0, 0.0])])
    assert plan.advantages is not None
    close(plan.advantages, vector(-5, 5))


def kl_of(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return (logits.softmax(0) * (logits.log_softmax(0) - ref.log_softmax(0))).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize(("gradient", "stale"), [("ratio", True), ("ratio", False), ("k2", False)])
def test_the_expected_gradient_is_that_of_kl(kind: str, gradient: str, stale: bool) -> None:
    """Over a whole vocabulary of five, each token once, weighted by the probability with which it was sampled: exact.
    Off-policy only the ratio is right."""
    g = torch.Generator().manual_seed(0)
    logits, ref, other_logits = torch.randn(3, 5, generator=g, dtype=DOUBLE)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(kl_of(logits, ref), logits)
    sampler = other_logits if stale else logits.detach()
    mu = sampler.log_softmax(0)
    batch = packed([5], mu=mu.tolist(), ref=ref.log_softmax(0).tolist())
    plugin = build("loss", "kl", beta=1.0, kind=kind, gradient=gradient, cap=None)
    loss, figures = plugin(View(batch, logits.log_softmax(0), batch.mu), None)
    (loss_gradient,) = torch.autograd.grad((mu.exp() * loss).sum(), logits, retain_graph=True)
    close(loss_gradient, expected)
    if gradient == "ratio" or kind == "k1" or not stale:
        close((mu.exp() * figures["kl"]).sum(), kl_of(logits, ref).detach())
    plain = build("loss", "kl", beta=1.0, kind=kind, cap=None)(
        View(batch, logits.log_softmax(0), batch.mu), None
    )
    (wrong,) = torch.autograd.grad((mu.exp() * plain[0]).sum(), logits)
    assert (wrong - expected).abs().max() > 0.1


def test_the_ratio_stays_finite_and_within_the_bound() -> None:
    batch = packed([3], mu=[-50.0, 50.0, torch.nan], ref=[5.0, 5.0, 0.0], mask=[1.0, 1.0, 0.0])
    loss, grad, _ = term(batch, vector(0, 0, 0), gradient="ratio")
    assert torch.isfinite(grad).all() and (loss <= 10).all()


def test_the_weight_of_kl_is_steered_to_its_target() -> None:
    """KL at 3 and then at 0.5 of the target: both errors count 0.2 at most; horizon 2."""
    plugin = build("loss", "adaptive_kl", beta=1.0, target=0.1, horizon=2.0)
    plugin.observe({"kl": 0.3})
    assert plugin.weight() == pytest.approx(1.1)
    plugin.observe({"kl": 0.09})
    assert plugin.weight() == pytest.approx(1.1 * 0.95)
    plugin.observe({"kl": math.nan})
    assert plugin.weight() == pytest.approx(1.1 * 0.95)
    again = build("loss", "adaptive_kl", beta=1.0, target=0.1, horizon=2.0)
    again.load_state_dict(plugin.state_dict())
    assert again.weight() == plugin.weight()


def test_the_entropy_bonus_acts_below_the_target_only() -> None:
    """The first update has the bonus; at or below the target the weight rises, above it falls and is not applied."""
    plugin = build("loss", "adaptive_entropy", coefficient=0.1, target=0.5, delta=0.02, highest=0.13)
    applied = []
    for entropy in (0.5, 0.4, 0.6, 0.4):
        applied.append(plugin.weight())
        plugin.observe({"entropy": entropy})
    assert applied == pytest.approx([0.1, 0.12, 0.13, 0.0])
    assert plugin.weight() == pytest.approx(0.13)
    again = build("loss", "adaptive_entropy", coefficient=0.1, target=0.5, delta=0.02, highest=0.13)
    again.load_state_dict(plugin.state_dict())
    assert (again.weight(), again.state_dict()) == (plugin.weight(), plugin.state_dict())
    with pytest.raises(UserError, match=r"coefficient = 2.0: expected lowest = 0.0 to highest = 1.0"):
        build("loss", "adaptive_entropy", coefficient=2.0)


def test_controllers_follow_metrics_and_survive_a_checkpoint() -> None:
    """Twice as far from the reference as wanted: the weight that a metric tells rises by a fifth of 1 / horizon."""
    kl = {"name": "adaptive_kl", "beta": 0.5, "target": 0.01, "horizon": 1.0}
    terms = [kl, {"name": "adaptive_entropy", "coefficient": 0.2}]
    algo = section(loss=["clip", *terms])
    objective = Objective(algo)
    batch = packed([2], ref=[-LOG2, -LOG2], advantages=[1.0, 1.0], weight=[1.0, 1.0])

    def update(one: Objective) -> dict[str, float]:
        metrics = loss_metrics(one(vector(0, 0), batch, vector(0.1, 0.1))[1], one.requirements.needs)
        one.after_step(list, metrics)
        return metrics

    first, second = update(objective), update(objective)
    assert (first["kl_beta"], second["kl_beta"]) == pytest.approx((0.5, 0.6))
    assert (first["entropy_coefficient"], second["entropy_coefficient"]) == pytest.approx((0.2, 0.205))
    fresh = Objective(algo)
    fresh.load_state_dict(objective.state_dict())
    assert update(fresh) == update(objective)
