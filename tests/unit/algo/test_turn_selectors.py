"""Turns by their entropy: by hand, over ranks, and through the objective."""

from __future__ import annotations

import math

import pytest
import torch

from rlsys.algo.methods.dart import least_sure, turn_entropies
from rlsys.algo.objective import Objective
from tests.helpers.algo_world import DOUBLE, World, packed, run, section, table

NAN = math.nan


def test_the_least_sure_turns_of_each_group_by_hand() -> None:
    entropies = torch.tensor([[0.5, 0.1], [0.9, NAN], [0.2, 0.3], [0.4, NAN]], dtype=DOUBLE)
    groups = torch.tensor([0, 0, 1, 1])
    assert least_sure(entropies, groups, 0.5).tolist() == [
        [True, False], [True, False], [False, True], [True, False]
    ]  # fmt: skip
    assert least_sure(entropies, groups, 0.34).tolist() == least_sure(entropies, groups, 0.5).tolist()
    assert least_sure(entropies, groups, 1.0).tolist() == (~entropies.isnan()).tolist()
    assert least_sure(torch.full((2, 2), NAN, dtype=DOUBLE), groups[:2], 0.5).sum() == 0


def test_a_turns_entropy_is_the_mean_of_its_trained_tokens_on_all_ranks() -> None:
    first = packed([4], mask=[1, 0, 1, 1], entropy=[0.2, 9.0, 0.4, 0.8])
    first.turns = torch.tensor([0, -1, 1, 1])
    second = packed([2], entropy=[0.1, 0.3])
    second.turns, second.rows = torch.tensor([0, 0]), torch.tensor([1])
    joint_entropies = turn_entropies([first, second], 2, lambda x: x)
    assert joint_entropies[:, :2].nan_to_num(-1.0).flatten().tolist() == pytest.approx([0.2, 0.6, 0.2, -1.0])
    second_entropies = turn_entropies([second], 2, lambda x: x).nan_to_num(0)
    first_entropies = turn_entropies([first], 2, lambda x: x).nan_to_num(0)
    assert torch.equal(joint_entropies.nan_to_num(0), first_entropies + second_entropies), (
        "each rank has its own rows"
    )


def test_only_chosen_turns_are_trained() -> None:
    objective = Objective(section(selectors=[{"name": "unsure_turns", "share": 0.5}], loss=["clip"]))
    part = packed([4, 2], mask=[1, 0, 1, 1, 1, 1], entropy=[0.2, 9.0, 0.4, 0.8, 0.7, 0.1])
    part.turns = torch.tensor([0, -1, 1, 1, 0, 0])
    plan = objective.plan(table([1.0, 0.0], [0, 0], [3, 2]))
    objective.finish(plan, [part])
    assert part.weight is not None
    assert (part.weight != 0).tolist() == [False, False, True, True, True, True]


def test_selecting_all_turns_changes_nothing() -> None:
    def whole(rows: list[int]) -> list[list[int]]:
        return [rows]

    without = run(World(), section(loss=["clip"]), whole)
    all_turns = run(
        World(), section(selectors=[{"name": "unsure_turns", "share": 1.0}], loss=["clip"]), whole
    )
    assert all_turns.loss == pytest.approx(without.loss)
    part = run(World(), section(selectors=[{"name": "unsure_turns", "share": 0.4}], loss=["clip"]), whole)
    assert part.loss != pytest.approx(without.loss)
