"""The divergence from a teacher, worked out by hand, and TRL's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from launch.bootstrap import PARITY_STAMP
from rlsys.algo import build
from rlsys.algo.losses import View
from rlsys.algo.methods.distill import divergence, divergence_over, with_rest
from rlsys.algo.preflight import check
from rlsys.config import Config
from rlsys.core.errors import UserError
from tests.helpers import parity
from tests.helpers.algo_world import packed

POLICY, TEACHER = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.25, 0.5, 0.25]).log()


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize(
    ("direction", "expected"),
    [
        (1.0, kl([0.5, 0.3, 0.2], [0.25, 0.5, 0.25])),
        (0.0, kl([0.25, 0.5, 0.25], [0.5, 0.3, 0.2])),
        (0.5, 0.5 * kl([0.25, 0.5, 0.25], [0.375, 0.4, 0.225]) + 0.5 * kl([0.5, 0.3, 0.2], [0.375, 0.4, 0.225])),
    ],
)  # fmt: skip
def test_by_hand(direction: float, expected: float) -> None:
    assert float(divergence(POLICY, TEACHER, direction)) == pytest.approx(expected, abs=1e-6)


def test_the_divergence_pools_the_remaining_probability_mass() -> None:
    """Two of four tokens: 0.6 and 0.1 against 0.2 and 0.2, and the rest 0.3 against 0.6."""
    policy, teacher = torch.tensor([0.6, 0.1]).log(), torch.tensor([0.2, 0.2]).log()
    assert torch.allclose(with_rest(policy).exp(), torch.tensor([0.6, 0.1, 0.3]))
    reverse_kl = float(divergence(with_rest(policy), with_rest(teacher), 1.0))
    assert reverse_kl == pytest.approx(kl([0.6, 0.1, 0.3], [0.2, 0.2, 0.6]), abs=1e-6)
    certain = with_rest(torch.tensor([0.0, -40.0]))
    assert certain.isfinite().all() and float(certain[2].exp()) < 2e-7


def test_the_distill_term_scales_the_divergence_and_reports_it() -> None:
    batch = packed([3], advantages=[0.0, 0.0, 0.0])
    view = View(batch, batch.mu, batch.mu, divergence=torch.tensor([0.5, 1.0, 2.0]))
    loss, figures = build("loss", "distill", weight=0.1)(view, None)
    assert torch.allclose(loss, torch.tensor([0.05, 0.1, 0.2]))
    assert figures["divergence"].tolist() == [0.5, 1.0, 2.0]


def test_without_a_rest_the_sum_over_some_tokens_is_verls() -> None:
    """verl's compute_forward_kl_topk: clamp both log-probs, sum p (log p - log q), and no negative loss."""
    policy = torch.tensor([[0.1, 2e-5], [0.6, 0.3]]).log().requires_grad_()
    teacher = torch.tensor([[0.5, 1e-5], [0.3, 0.1]]).log()
    forward_kl = divergence_over(policy, teacher, 0.0, tail_bucket=False, least_logprob=-10.0)
    floor = math.exp(-10)
    by_hand = 0.5 * math.log(5) + floor * math.log(floor / floor)
    assert forward_kl.tolist() == pytest.approx([by_hand, 0.0], abs=1e-7)
    (gradient,) = torch.autograd.grad(forward_kl.sum(), policy)
    assert gradient.tolist() == [pytest.approx([-0.5, 0.0]), [0.0, 0.0]]
    batch = packed([2], advantages=[0.0, 0.0])
    loss, figures = build("loss", "distill", cap=0.5)(
        View(batch, batch.mu, batch.mu, divergence=forward_kl), None
    )
    assert loss.tolist() == pytest.approx([0.5, 0.0]) and float(figures["divergence"][0]) > 0.5


def test_the_policy_gradient_of_the_sampled_tokens_is_verls() -> None:
    """verl's distillation_loss with k1 and use_policy_gradient: compute_policy_loss_vanilla of -clamp(k1)."""
    batch = packed([4], advantages=[0.0] * 4)
    logp = (batch.mu + torch.tensor([0.0, 0.5, 0.5, -0.5])).requires_grad_()
    k1_estimates = torch.tensor([0.2, -30.0, 30.0, 1.0])
    term = build("loss", "distill_pg", weight=2.0, cap=10.0, dual=3.0)
    loss, figures = term(View(batch, logp, batch.mu, divergence=k1_estimates), None)
    advantages = [-0.2, 10.0, -10.0, -1.0]
    ratios = [1.0, math.exp(0.5), math.exp(0.5), math.exp(-0.5)]
    expected = []
    for a, r in zip(advantages, ratios, strict=True):
        clipped = max(-a * r, -a * min(max(r, 0.8), 1.2))
        expected.append(2.0 * (min(-a * 3.0, clipped) if a < 0 else clipped))
    assert loss.tolist() == pytest.approx(expected, rel=1e-6)
    assert figures["divergence"].tolist() == pytest.approx(k1_estimates.tolist())
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert gradient.tolist() == pytest.approx([0.4, 0.0, 20 * math.exp(0.5), 0.0], rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "teacher", "message"),
    [
        ("distill_pg", {}, "algo.teacher.top_k = 64: algo.loss distill_pg compares the sampled token; expected 0"),
        ("distill", {"top_k": 0}, "algo.teacher.top_k = 0: algo.loss distill compares the most probable tokens"),
    ],
)  # fmt: skip
def test_a_term_and_the_teachers_tokens_fit(loss: str, teacher: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        check(config_of(loss=[loss], teacher={"path": "configs/models/quickstart-moe", **teacher}))
    with pytest.raises(ValueError, match="top_k = 0 compares only the sampled token"):
        config_of(teacher={"path": "configs/models/quickstart-moe", "top_k": 0, "tail_bucket": False})


def config_of(**algo: object) -> Config:
    return Config.model_validate({"model": {"path": "configs/models/quickstart-moe"}, "algo": algo})


def test_distillation_works_alone_or_with_a_policy_loss_but_requires_a_teacher() -> None:
    teacher = {"path": "configs/models/quickstart-moe"}
    check(config_of(loss=["distill"], teacher=teacher))
    check(config_of(loss=["distill_pg"], teacher=teacher | {"top_k": 0}))
    check(config_of(loss=["clip", {"name": "distill", "weight": 0.1}], teacher=teacher))
    with pytest.raises(UserError, match=r"algo\.teacher is not set") as e:
        check(config_of(loss=["distill"]))
    assert "\n" not in str(e.value)


@pytest.mark.gate  # only `make test` installs TRL
@pytest.mark.skipif(not PARITY_STAMP.is_file(), reason="TRL: launch/bootstrap.py --parity")
@pytest.mark.filterwarnings("ignore")  # of TRL's own classes, which pytest's main process cannot import
@pytest.mark.parametrize("direction", [0.0, 0.3, 1.0])
def test_value_and_gradient_are_trls(direction: float) -> None:
    """GKD's loss over a whole vocabulary, and the support with a rest of its distillation from a server."""
    with parity.importable():
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
        from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket

    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 1, 7, 13, generator=g, dtype=torch.float64)
    student.requires_grad_()
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    same(
        divergence(p, q, direction).sum(),
        GKDTrainer.generalized_jsd_loss(student, teacher, beta=direction, reduction="sum"),
        student,
    )
    best = q.topk(4).indices
    valid = torch.ones_like(best, dtype=torch.bool)
    student_support, teacher_support = (with_rest(x.gather(-1, best)) for x in (p, q))
    expected, _ = _add_tail_bucket(p.gather(-1, best), valid)
    same(student_support.sum(), expected.sum(), student)
    assert torch.equal(teacher_support, _add_tail_bucket(q.gather(-1, best), valid)[0])


def same(mine: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)
    (gradient,), (reference_gradient,) = (
        torch.autograd.grad(x, leaf, retain_graph=True) for x in (mine, theirs)
    )
    assert torch.allclose(gradient, reference_gradient, rtol=0, atol=1e-6)
