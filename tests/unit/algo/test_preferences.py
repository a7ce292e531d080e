"""Losses on compared answers, worked out by hand, and what every one of them promises."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.algo import build
from rlsys.algo.contract import check_promises
from rlsys.algo.registry import TABLE
from rlsys.algo.sft.preferences import Answers
from rlsys.config import load_config

ROOT = Path(__file__).resolve().parents[3]


def two(**changes: Any) -> Answers:
    """A pair. Gains over the reference: 2 and -1; 4 and 2 tokens."""
    defaults: dict[str, Tensor] = {
        "logp": torch.tensor([-6.0, -3.0]), "ref": torch.tensor([-8.0, -2.0]), "tokens": torch.tensor([4, 2]),
        "pair": torch.tensor([7, 7]), "liked": torch.tensor([True, False]), "margin": torch.zeros(2),
        "drift": torch.tensor([0.5, 0.3]),
    }  # fmt: skip
    return Answers(**{**defaults, **changes})


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("dpo", {"beta": 0.5}, -math.log(sigmoid(0.5 * 3))),
        ("robust_dpo", {"beta": 0.5, "wrong": 0.1},
         (0.1 * math.log(sigmoid(-1.5)) - 0.9 * math.log(sigmoid(1.5))) / 0.8),
        ("dpo_norm", {"beta": 2.0}, -math.log(sigmoid(2 * (2 / 4 + 1 / 2)))),
        ("ipo", {"beta": 0.5}, (2 / 4 + 1 / 2 - 1) ** 2),
        ("hinge", {"beta": 0.1}, 1 - 0.3),
        ("hinge", {"beta": 0.5}, 0.0),
        ("nca", {"beta": 0.5}, -math.log(sigmoid(1)) - 0.5 * math.log(sigmoid(-1)) - 0.5 * math.log(sigmoid(0.5))),
        ("bco", {"beta": 0.5}, -math.log(sigmoid(1)) - math.log(sigmoid(0.5))),
        ("sppo", {"beta": 0.5}, (2 - 1) ** 2 + (-1 + 1) ** 2),
        ("apo_zero", {"beta": 0.5}, 1 - sigmoid(1) + sigmoid(-0.5)),
        ("apo_down", {"beta": 0.5}, sigmoid(1) + 1 - sigmoid(1.5)),
        ("aot", {"beta": 0.5}, -math.log(sigmoid(1.5))),
        ("simpo", {"beta": 2.0, "margin": 0.25}, -math.log(sigmoid(2 * (-1.5 + 1.5) - 0.25))),
        ("cpo", {"beta": 0.5}, -math.log(sigmoid(0.5 * -3)) + 6 / 4),
        ("orpo", {"beta": 0.1}, 6 / 4 - 0.1 * math.log(0.5)),
        ("kto", {"beta": 0.5, "bad": 2.0}, ((1 - sigmoid(0.5 * (2 - 0.4))) + 2 * (1 - sigmoid(0.5 * (0.4 + 1)))) / 2),
        ("apo_zero_labels", {"beta": 0.5}, (1 - sigmoid(1) + sigmoid(-0.5)) / 2),
    ],
)  # fmt: skip
def test_by_hand(name: str, params: dict[str, Any], expected: float) -> None:
    assert float(build("preference", name, **params)(two())) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", TABLE["preference"])
@pytest.mark.parametrize("tokens", [[0, 2], [2, 0], [0, 0]])
def test_an_answer_without_a_trained_token_has_a_finite_loss_and_gradient(
    name: str, tokens: list[int]
) -> None:
    """There is nothing to imitate: the cross entropy of no token is 0."""
    params = {"imitate": 1.0} if name == "simpo" else {}
    logp = torch.tensor([-0.5 * n for n in tokens], dtype=torch.float64, requires_grad=True)
    value = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    answers = two(
        logp=logp, ref=logp.detach() - 0.1, tokens=torch.tensor(tokens), drift=torch.zeros(2), value=value
    )
    loss = build("preference", name, **params)(answers)
    gradients = torch.autograd.grad(loss, [logp, value], allow_unused=True)
    assert math.isfinite(loss)
    assert all(g is None or bool(g.isfinite().all()) for g in gradients)


def test_kto_never_starts_below_the_reference() -> None:
    behind = two(drift=torch.tensor([-3.0, 1.0]))
    expected = ((1 - sigmoid(0.2)) + (1 - sigmoid(0.1))) / 2
    assert float(build("preference", "kto", beta=0.1)(behind)) == pytest.approx(expected, abs=1e-6)


def test_a_reward_model_must_lead_by_the_margin() -> None:
    marked = two(value=torch.tensor([1.5, 0.5]), margin=torch.tensor([1.0, 1.0]))
    loss = build("preference", "reward_model", centre=0.01)
    assert float(loss(marked)) == pytest.approx(math.log(2) + 0.01 * 4, abs=1e-6)
    assert loss.rewards(marked).tolist() == [1.5, 0.5]


def test_pairs_are_found_at_any_position() -> None:
    """Three pairs, of which no two answers lie together."""
    answers = two(
        pair=torch.tensor([2, 0, 1, 0, 1, 2]), liked=torch.tensor([True, False, True, True, False, False])
    )
    values = torch.arange(6)
    assert answers.select_chosen(values).tolist() == [3, 2, 0]
    assert answers.select_rejected(values).tolist() == [1, 4, 5]


@pytest.mark.parametrize("name", TABLE["preference"])
def test_every_loss_keeps_its_promises(name: str) -> None:
    lines = list(check_promises(load_config(ROOT / "configs/quickstart.yaml"), "preference", name))
    assert lines[0].startswith(f"made: preference {name}, evidence R")
    assert len(lines) == 3


@pytest.mark.parametrize("path", sorted((ROOT / "configs/preferences").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_load(path: Path) -> None:
    config = load_config(path)
    assert config.sft.traces == "chain_sum_pairs"
    if path.stem != "base":
        assert config.sft.loss is not None and config.sft.loss.name == path.stem
        assert build("preference", path.stem, **config.sft.loss.params)
