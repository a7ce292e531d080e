"""Rejection by estimates of KL at each level, lower bounds of weights, responses that were cut off: by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch
from rlsys.algo.losses import View
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import single_rank
from rlsys.core.errors import UserError
from tests.helpers.algo_world import DOUBLE, World, on_ranks, packed, run, section, table

LOG2 = math.log(2)
D = [LOG2, 0.0, -LOG2, 0.0]
"""anchor - mu of four tokens. k1: -0.69, 0, 0.69, 0. k2: 0.24, 0, 0.24, 0. k3: 0.307, 0, 0.193, 0."""


def kept(batch: Batch, gap: list[float], **params: object) -> list[bool]:
    anchor = torch.tensor(gap, dtype=DOUBLE)
    plugin = build("correction", "rejection", **params)
    update_stats = plugin.prepare([batch], [anchor], single_rank)
    weight, keep = plugin(View(batch, anchor, anchor), update_stats)
    assert (weight == 1).all()
    return list(keep.tolist())


@pytest.mark.parametrize(
    ("kind", "level", "bounds", "expected"),
    [
        ("k1", "token", {"low": -0.5, "high": 0.5}, [False, True, False, True]),
        ("k1", "token", {"high": 0.5}, [True, True, False, True]),
        ("k2", "token", {"high": 0.2}, [False, True, False, True]),
        ("k3", "token", {"high": 0.2}, [False, True, True, True]),
        ("k1", "sequence_sum", {"low": -0.5, "high": 0.5}, [False, False, False, False]),
        ("k1", "sequence_mean", {"low": -0.5, "high": 0.5}, [True, True, True, True]),
        ("k3", "sequence_sum", {"high": 0.2}, [False, False, True, True]),
        ("k3", "sequence_mean", {"high": 0.1}, [False, False, True, True]),
        ("k3", "sequence_max", {"high": 0.2}, [False, False, True, True]),
    ],
)
def test_each_level_by_hand(kind: str, level: str, bounds: dict[str, float], expected: list[bool]) -> None:
    """Two responses of two tokens: the ratios are 2 and 1, 1/2 and 1."""
    assert kept(packed([2, 2]), D, kind=kind, level=level, **bounds) == expected


def grouped(**fields: list[float]) -> Batch:
    """Responses of 2, 1 and 1 tokens: the first two of one group, the third of another."""
    batch = packed([2, 1, 1], advantages=[1.0] * 4, **fields)
    batch.groups = torch.tensor([0, 0, 1])
    return batch


@pytest.mark.parametrize(
    ("level", "limit"), [("group_sum", 0.5), ("group_mean", 0.5 / 3), ("group_max", 0.3068)]
)
def test_a_group_is_kept_or_rejected_as_a_whole(level: str, limit: float) -> None:
    """k3 of the first group: 0.307, 0, 0.193, of which the largest is 1 - ln 2; of the second 0."""
    for high, stays in ((limit * 1.001, True), (limit * 0.999, False)):
        assert kept(grouped(), D, level=level, high=high) == [stays] * 3 + [True]


def test_a_group_counts_its_trained_tokens_with_an_advantage() -> None:
    batch = grouped(mask=[0.0, 1.0, 1.0, 1.0])
    assert kept(batch, [torch.nan, *D[1:]], level="group_sum", high=0.2) == [False, True, True, True]
    batch = grouped()
    batch.advantages = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=DOUBLE)
    assert kept(batch, D, level="group_mean", high=0.16) == [True] * 4  # 0.307 / 2, not 0.5 / 3


@pytest.mark.parametrize(
    ("kind", "level", "high"),
    [
        ("k1", "group_mean", 0.0),
        ("k1", "group_sum", 0.0),
        *(
            (kind, *of)
            for kind in ("k2", "k3")
            for of in (("group_mean", 0.05), ("group_sum", 0.8), ("group_max", 0.4))
        ),
    ],
)
def test_groups_over_ranks_are_the_same_groups(kind: str, level: str, high: float) -> None:
    world = World(size=4)
    correction = {"name": "rejection", "kind": kind, "level": level, "high": high}
    algo = section(anchor="old", corrections=[correction])
    reference = run(world, algo, lambda rows: [rows])
    assert 0 < reference.metrics["rejected_share"] < 1
    ranks = on_ranks(2, lambda rank, reduce: run(world, algo, lambda r: [[i] for i in r[rank::2]], reduce))
    assert ranks[0].metrics["rejected_share"] == pytest.approx(reference.metrics["rejected_share"])
    assert ranks[0].loss == pytest.approx(reference.loss)


def test_a_term_without_weight_changes_no_group() -> None:
    """It packs samples of advantage 0, which other tokens' groups must not feel."""
    world = World(size=4)
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5] * 4, dtype=DOUBLE)
    world.samples = replace(world.samples, rewards=rewards)
    fields = {
        "anchor": "old",
        "corrections": [{"name": "rejection", "level": "group_mean", "high": 0.05}],
    }
    plain = run(world, section(**fields), lambda rows: [rows])
    zero_kl = run(world, section(loss=["clip", {"name": "kl", "beta": 0.0}], **fields), lambda rows: [rows])
    assert len(zero_kl.rows) == 16 and len(plain.rows) == 8
    assert plain.metrics["rejected_share"] > 0
    for row in plain.rows:
        torch.testing.assert_close(zero_kl.gradients[row], plain.gradients[row])


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"kind": "k3", "low": 0.1}, "low = 0.1 with kind = k3, which is never below 0: expected null"),
        (
            {"kind": "k2", "high": 0.0},
            "high = 0.0 with kind = k2, which is never below 0: expected more than 0",
        ),
        ({"kind": "k1", "low": 1.0, "high": 0.5}, "low = 1.0: expected less than high = 0.5"),
        ({"kind": "k1", "level": "group_max"}, "level = 'group_max' with kind = k1"),
    ],
)
def test_bounds_without_a_meaning_are_refused(params: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        build("correction", "rejection", **params)


def test_tis_with_a_lower_bound_by_hand() -> None:
    anchor = torch.tensor([2 * LOG2, -2 * LOG2, 0.0], dtype=DOUBLE)
    weight, keep = build("correction", "tis", floor=0.5)(View(packed([3]), anchor, anchor), None)
    torch.testing.assert_close(weight, torch.tensor([2, 0.5, 1], dtype=DOUBLE))
    assert keep.all()
    with pytest.raises(UserError, match=r"floor = 3.0: expected at most cap = 2.0"):
        build("correction", "tis", floor=3)


CUT = {"truncated": torch.tensor([False, True, False, False])}


@pytest.mark.parametrize(
    ("reducer", "denominator", "expected"),
    [
        ("token_mean", "all", 18),
        ("token_mean", "kept", 14),
        ("sequence_mean", "all", 4),
        ("sequence_mean", "kept", 3),
        ({"name": "constant", "length": 10}, "all", 40),
    ],
)
def test_a_response_that_was_cut_off_is_not_trained(reducer: object, denominator: str, expected: int) -> None:
    """It stays in the baseline of its group, and by choice in the denominator."""
    selector = {"name": "overlong_filter", "denominator": denominator}
    objective = Objective(section(selectors=[selector], advantage="dr_grpo", reducer=reducer))
    plan = objective.plan(table([1, 0, 1, 0], [0, 0, 1, 1], [3, 4, 5, 6], **CUT))
    assert plan.rows == [0, 2, 3]
    assert plan.denominator == pytest.approx(expected, rel=1e-12)
    assert plan.advantages is not None and plan.advantages[0] == 0.5


def test_a_step_of_truncated_responses_has_nothing_to_train() -> None:
    every = torch.ones(2, dtype=torch.bool)
    for denominator in ("all", "kept"):
        selector = {"name": "overlong_filter", "denominator": denominator}
        plan = Objective(section(selectors=[selector])).plan(table([1, 0], [0, 0], truncated=every))
        assert plan.rows == []
