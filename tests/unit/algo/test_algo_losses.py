"""Losses and trust regions against numbers worked out by hand: token losses, gradients, what is clipped."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch
from rlsys.algo.kl import kl_estimate
from rlsys.algo.losses import View
from rlsys.algo.methods.m2po import largest_cap, largest_kept
from rlsys.algo.reduction import single_rank
from tests.helpers.algo_world import DOUBLE, packed

close = torch.testing.assert_close
LOG2 = math.log(2)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def losses(
    name: str, batch: Batch, logp: list[float], prepare: bool = False, **params: object
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(token losses, gradient of their sum, sums of the figures); the anchor is mu."""
    term, leaf = build("loss", name, **params), torch.tensor(logp, dtype=DOUBLE, requires_grad=True)
    update_stats = term.prepare([batch], [batch.mu], single_rank) if prepare else None
    loss, figures = term(View(batch, leaf, batch.mu), update_stats)
    loss.sum().backward()
    assert leaf.grad is not None
    sums = {name: float(batch.masked(values).sum()) for name, values in figures.items()}
    return loss.detach(), leaf.grad, sums


def tokens(*advantages: float, lengths: list[int] | None = None, **fields: list[float]) -> Batch:
    return packed(lengths or [len(advantages)], advantages=list(advantages), **fields)


def test_clip_by_hand() -> None:
    """Ratio 2: A > 0 clipped at 1.28; A < 0 not. Ratio 1/2: A > 0 not; A < 0 clipped at 0.8."""
    batch = tokens(1, -1, 1, -1)
    loss, grad, sums = losses("clip", batch, [LOG2, LOG2, -LOG2, -LOG2])
    close(loss, vector(-1.28, 2, -0.5, 0.8))
    close(grad, vector(0, 2, -0.5, 0))
    assert sums["clipped"] == 2


def test_dual_clip_by_hand() -> None:
    """A < 0 with ratio 8: 8 without, 3 with the cap, and then no gradient; A > 0 is as before."""
    loss, grad, sums = losses("dual_clip", tokens(-1, 1), [3 * LOG2, 3 * LOG2])
    close(loss, vector(3, -1.28))
    close(grad, vector(0, 0))
    assert sums["clipped"] == 2


def test_gspo_by_hand() -> None:
    """Log-ratios 0.1 and 0.3: s = e^0.2 for both tokens. Unclipped gradient -s A each; clipped at 1.1 none."""
    loss, grad, _ = losses("gspo", tokens(1, 1), [0.1, 0.3], clip_high=1.0)
    close(loss, vector(-1, -1) * math.exp(0.2))
    close(grad, vector(-1, -1) * math.exp(0.2))
    loss, grad, sums = losses("gspo", tokens(1, 1), [0.1, 0.3], clip_high=0.1)
    close(loss, vector(-1.1, -1.1))
    close(grad, vector(0, 0))
    assert sums["clipped"] == 2


def test_gspo_takes_each_sequence_by_itself_and_leaves_masked_tokens_out() -> None:
    batch = tokens(1, 1, 1, lengths=[2, 1], mask=[1.0, 0.0, 1.0])
    loss, _, _ = losses("gspo", batch, [LOG2, 99.0, 0.0], clip_high=9.0)
    close(loss[batch.keep], vector(-2, -1))


def test_cispo_by_hand() -> None:
    """Weights 1.28, 1.28 (A < 0 too), 1/2; loss -w A logp, gradient -w A: no token loses it."""
    loss, grad, sums = losses("cispo", tokens(1, -1, 1), [LOG2, LOG2, -LOG2])
    close(loss, vector(-1.28 * LOG2, 1.28 * LOG2, 0.5 * LOG2))
    close(grad, vector(-1.28, 1.28, -0.5))
    assert sums == {"capped_share": 2}


def test_sapo_by_hand() -> None:
    """r = 2: -4 sigmoid(1) for A > 0, (4 / 1.05) sigmoid(1.05) for A < 0. At r = 1 the gradient is -A."""
    loss, _, _ = losses("sapo", tokens(1, -1), [LOG2, LOG2])
    close(loss, vector(-4 / (1 + math.exp(-1)), 4 / 1.05 / (1 + math.exp(-1.05))))
    _, grad, _ = losses("sapo", tokens(1, -1), [0.0, 0.0])
    close(grad, vector(-1, 1))


def test_reinforce_by_hand() -> None:
    loss, grad, _ = losses("reinforce", tokens(2, -1), [-1.0, -3.0])
    close(loss, vector(2, -3))
    close(grad, vector(-2, 1))


def test_kl_estimates_by_hand() -> None:
    logp, ref = vector(0), vector(-LOG2)  # logp - ref = ln 2
    close(kl_estimate(logp, ref, "k1"), vector(LOG2))
    close(kl_estimate(logp, ref, "k2"), vector(LOG2**2 / 2))
    close(kl_estimate(logp, ref, "k3"), vector(0.5 - 1 + LOG2))


def test_kl_and_entropy_and_value_terms_by_hand() -> None:
    loss, grad, sums = losses("kl", tokens(1, ref=[-LOG2]), [0.0], beta=0.5, kind="k2")
    close(loss, vector(LOG2**2 / 4))
    close(grad, vector(LOG2 / 2))
    assert sums["kl"] == pytest.approx(LOG2**2 / 2)
    batch = tokens(1, 1, values=[0.0, 0.0], returns=[1.0, 1.0])
    view = View(batch, batch.mu, batch.mu, entropy=vector(2, 3), values=vector(0.1, 0.5))
    close(build("loss", "entropy", coefficient=0.1)(view, None)[0], vector(-0.2, -0.3))
    # V = 0.1 is near its old value; V = 0.5 counts as if it had moved by 0.2 only: error 0.64, not 0.25
    close(build("loss", "value", coefficient=1.0)(view, None)[0], vector(0.81 / 2, 0.64 / 2))


# -- bounds from the whole update ----------------------------------------------------------------------------


def test_largest_kept_by_hand() -> None:
    """0.01, 0.04, 0.09, 1: the mean of the first three is 0.0467, of two 0.025; so the cut lies below 0.09."""
    cut = largest_kept([vector(1, 0.01), vector(0.09, 0.04)], 0.04, single_rank)
    assert 0.04 < cut < 0.09


def test_largest_cap_by_hand() -> None:
    """Squares 0.01 and 1: mean of min(., c^2) = 0.04 at c^2 = 0.07."""
    cap = largest_cap([vector(0.01, 1)], torch.tensor(2.0, dtype=DOUBLE), 0.04, single_rank)
    assert cap == pytest.approx(math.sqrt(0.07), abs=1e-6)


@pytest.mark.parametrize("anchor", [0.0, -2.0])
def test_m2po_mask_by_hand(anchor: float) -> None:
    """Log-ratios 0.1, 0.2, 0.3, 1: the last two drop out of the budget; the kept have -r A and its gradient."""
    logps = [anchor + log_ratio for log_ratio in (0.1, 0.2, 0.3, 1.0)]
    batch = tokens(1, -1, 1, -1, mu=[anchor] * 4, current=logps)
    loss, grad, sums = losses("m2po", batch, logps, prepare=True, form="mask")
    close(loss, vector(-math.exp(0.1), math.exp(0.2), 0, 0))
    close(grad, loss)
    assert sums["clipped"] == 2


def test_m2po_bounds_by_hand() -> None:
    """Only what a trust region can bite counts: 0.1 (A > 0), -1 (A < 0). The cap sqrt(0.07) bounds all ratios."""
    logps = [0.1, -1.0, -5.0]
    loss, _, sums = losses("m2po", tokens(1, -1, 1, current=logps), logps, prepare=True)
    close(loss, vector(-math.exp(0.1), math.exp(-math.sqrt(0.07)), -math.exp(-5)), atol=1e-6, rtol=0)
    assert sums["clipped"] == 1


def test_m2po_bounds_do_not_hang_on_the_signs_of_rounding() -> None:
    """A hundred fresh tokens on which trainer and engine agree to 1e-6, and three stale ones. The same fresh tokens,
    rounded the other way by another CPU, were 61 instead of 39 of the mean, and moved the bounds by a fifth."""
    fresh = [1e-6 if i % 100 < 39 else -1e-6 for i in range(100)]
    term, bounds = build("loss", "m2po"), []
    for sign in (1, -1):
        batch = tokens(*[1] * 103, current=[*(sign * f for f in fresh), 2.0, 1.0, 1.5])
        bounds.append(term.prepare([batch], [batch.mu], single_rank))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)
    assert bounds[0][1] == pytest.approx(math.exp(math.sqrt(0.04 * 53 / 3)), rel=1e-3)


def test_bapo_takes_equal_shares_as_equal_in_any_order() -> None:
    """All ratios 1: C+ = C- = 0.6, but 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in the last bit."""
    term, parts = build("loss", "bapo"), tokens(0.1, 0.2, 0.3, -0.3, -0.2, -0.1, current=[0.0] * 6)
    permuted_batch = tokens(0.3, 0.2, 0.1, -0.1, -0.2, -0.3, current=[0.0] * 6)
    bounds = [term.prepare([batch], [batch.mu], single_rank) for batch in (parts, permuted_batch)]
    assert bounds == [(0.6, 1.2)] * 2


def test_m2po_within_budget_clips_nothing_and_a_floor_holds() -> None:
    logps = [0.1, -0.1]
    assert losses("m2po", tokens(1, -1, current=logps), logps, prepare=True)[2]["clipped"] == 0
    term = build("loss", "m2po", floor_low=0.3, floor_high=0.5)
    wild = tokens(1, -1, current=[3.0, -3.0])
    low, high = term.prepare([wild], [wild.mu], single_rank)
    assert (low, high) == (pytest.approx(0.7), pytest.approx(1.5))


def test_bapo_by_hand() -> None:
    """C+ = min(2, high), C- = max(1/2, low) * 2. At the start 1.2 and 1.2: a target of 0.9 is met at once. A target
    of 1.5 is out of reach: `low` rises to 0.9 (C- = 1.8) in vain, then `high` to its maximum, where C+ = 2 < 2.7."""
    batch = tokens(1, -2, current=[LOG2, -LOG2])
    assert build("loss", "bapo", target=0.9).prepare([batch], [batch.mu], single_rank) == (0.6, 1.2)
    assert build("loss", "bapo", target=1.5).prepare([batch], [batch.mu], single_rank) == (0.9, 3.0)
    path = build("loss", "bapo", low_min=0.6, low_max=0.8, high_min=1.2, high_max=1.4, step=0.1).path()
    expected = [(0.6, 1.2), (0.7, 1.2), (0.8, 1.2), (0.8, 1.3), (0.8, 1.4)]
    assert [tuple(round(x, 6) for x in p) for p in path] == expected


def test_bapo_raises_the_upper_bound_until_positives_have_their_share() -> None:
    """C- = max(1, low) = 1 whatever `low`; C+ = min(2, high): 1.45 is met at high = 1.5."""
    batch = tokens(1, -1, current=[LOG2, 0.0])
    low, high = build("loss", "bapo", target=1.45, step=0.1).prepare([batch], [batch.mu], single_rank)
    assert (low, high) == (pytest.approx(0.9), pytest.approx(1.5))


@pytest.mark.parametrize("name", ["clip", "dual_clip", "gspo", "cispo", "sapo", "reinforce", "m2po", "bapo"])
def test_at_ratio_one_every_policy_loss_has_the_policy_gradient(name: str) -> None:
    """d loss / d logp = -A on fresh tokens: the methods differ only off-policy."""
    _, grad, _ = losses(
        name, tokens(1, -2, 0.5, current=[0.0] * 3), [0.0] * 3, prepare=name in ("m2po", "bapo")
    )
    close(grad, vector(-1, 2, -0.5))


@pytest.mark.parametrize("name", ["clip", "dual_clip", "gspo", "cispo", "sapo", "reinforce", "m2po", "bapo"])
@pytest.mark.parametrize("gap", [50.0, -50.0])
def test_log_ratios_of_fifty_stay_finite(name: str, gap: float) -> None:
    batch = tokens(1, -1, current=[gap, gap])
    loss, grad, _ = losses(name, batch, [gap, gap], prepare=name in ("m2po", "bapo"))
    assert torch.isfinite(loss).all() and torch.isfinite(grad).all()
