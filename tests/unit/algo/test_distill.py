"""The divergence from a teacher, worked out by hand, and TRL's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from launch.bootstrap import PARITY_STAMP
from rlsys.algo import build
from rlsys.algo.losses import View
from rlsys.algo.methods.distill import divergence, with_rest
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


def test_what_is_not_compared_by_itself_is_compared_together() -> None:
    """Two of four tokens: 0.6 and 0.1 against 0.2 and 0.2, and the rest 0.3 against 0.6."""
    policy, teacher = torch.tensor([0.6, 0.1]).log(), torch.tensor([0.2, 0.2]).log()
    assert torch.allclose(with_rest(policy).exp(), torch.tensor([0.6, 0.1, 0.3]))
    found = float(divergence(with_rest(policy), with_rest(teacher), 1.0))
    assert found == pytest.approx(kl([0.6, 0.1, 0.3], [0.2, 0.2, 0.6]), abs=1e-6)
    certain = with_rest(torch.tensor([0.0, -40.0]))
    assert certain.isfinite().all() and float(certain[2].exp()) < 2e-7


def test_the_term_weighs_it_and_tells_its_mean() -> None:
    batch = packed([3], advantages=[0.0, 0.0, 0.0])
    view = View(batch, batch.mu, batch.mu, divergence=torch.tensor([0.5, 1.0, 2.0]))
    loss, figures = build("loss", "distill", weight=0.1)(view, None)
    assert torch.allclose(loss, torch.tensor([0.05, 0.1, 0.2]))
    assert figures["divergence"].tolist() == [0.5, 1.0, 2.0]


def config_of(**algo: object) -> Config:
    return Config.model_validate({"model": {"path": "configs/models/quickstart-moe"}, "algo": algo})


def test_it_trains_alone_and_beside_a_policy_loss_but_not_without_a_teacher() -> None:
    teacher = {"path": "configs/models/quickstart-moe"}
    check(config_of(loss=["distill"], teacher=teacher))
    check(config_of(loss=["clip", {"name": "distill", "weight": 0.1}], teacher=teacher))
    with pytest.raises(UserError, match=r"algo\.teacher names none") as e:
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
    ours, theirs = (with_rest(x.gather(-1, best)) for x in (p, q))
    expected, _ = _add_tail_bucket(p.gather(-1, best), valid)
    same(ours.sum(), expected.sum(), student)
    assert torch.equal(theirs, _add_tail_bucket(q.gather(-1, best), valid)[0])


def same(mine: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-6)
    (left,), (right,) = (torch.autograd.grad(x, leaf, retain_graph=True) for x in (mine, theirs))
    assert torch.allclose(left, right, rtol=0, atol=1e-6)
