"""A critic of its own: a second model with its own optimizer, which learns alone at first, in every layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlsys.trainer.trainer import Trainer
from tests.helpers import critic_cases as cases

pytestmark = pytest.mark.integration

TWO = ("dp=2", "cp=2", "tp=2", "pp=2")
ALSO_TWO = ("ep=2", "dp=2,overlap=true")


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_critic_trains_alone_during_warmup_and_is_restored_exactly(tmp_path: Path) -> None:
    """Its own weights move at its own rate; the policy's rest, and then move without its loss in theirs."""
    trainer, critic, objective = cases.start(tmp_path, "algo.critic.lr=2e-3")
    policy, values = weights(trainer), weights(critic)
    assert not any("value" in name for name in policy)
    assert "output_layer.bias" in values

    warm_up_metrics = cases.step(trainer, objective, cases.WARM_UP)
    assert same(weights(trainer), policy) and not same(weights(critic), values)
    assert warm_up_metrics["critic_lr"] == 2e-3 and warm_up_metrics["critic_loss"] > 0
    assert "loss" not in warm_up_metrics

    joint_metrics = cases.step(trainer, objective, 2)
    assert not same(weights(trainer), policy)
    assert joint_metrics["lr"] == 1e-3 and joint_metrics["value_error"] < warm_up_metrics["value_error"]
    # A step of size one without clip or drift: the policy's loss has no term of the critic.
    cases.save(trainer, objective, 2)
    expected, moved = cases.step(trainer, objective, 3), (weights(trainer), weights(critic))
    trainer.close()

    trainer, critic, objective = cases.start(tmp_path, "algo.critic.lr=2e-3")
    assert trainer.load_checkpoint(objective) == 2
    assert cases.step(trainer, objective, 3) == expected
    assert same(weights(trainer), moved[0]) and same(weights(critic), moved[1])
    trainer.close()


@pytest.mark.parametrize(
    "layouts", [TWO, pytest.param(ALSO_TWO, marks=pytest.mark.full)], ids=["each axis", "more"]
)
def test_a_critic_is_the_same_in_every_layout(layouts: tuple[str, ...], tmp_path: Path) -> None:
    """Three steps as one process takes them, and a fourth from that process's checkpoint."""
    trainer, _, objective = cases.start(tmp_path / "alone")
    expected = [cases.step(trainer, objective, n) for n in (1, 2, 3)]
    cases.save(trainer, objective, 3)
    expected.append(cases.step(trainer, objective, 4))
    trainer.close()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = [*torchrun, "-m", cases.__name__, str(tmp_path), *layouts]
    subprocess.run(command, check=True, env=env, cwd=Path(__file__).parents[2])
    results = json.loads((tmp_path / "seen.json").read_text())
    wrong = [
        (layout, n, name, value, step_metrics[n].get(name))
        for layout, step_metrics in results.items()
        for n in range(4)
        for name, value in expected[n].items()
        if step_metrics[n].get(name) != pytest.approx(value, rel=5e-4, abs=5e-5)
    ]
    assert tuple(results) == layouts
    assert not wrong
