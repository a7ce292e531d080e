"""A token counts in a statistic if and only if its weight is not 0; ties are drawn; rounding is no reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.losses import View
from rlsys.algo.objective import Objective
from rlsys.algo.planners import Accept, Drop
from rlsys.algo.reduction import single_rank
from rlsys.core.types import Sample, SampleGroup
from tests.helpers.algo_world import DOUBLE, World, packed, run, section, table


def whole(rows: list[int]) -> list[list[int]]:
    return [rows]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_dropped_token_is_in_no_mean_of_the_covariance(name: str) -> None:
    """Advantages 3, 1, -1 and log-probs -0.5, -1.5, -1 of the counted tokens: means 1 and -1."""
    values = {"advantages": [3.0, 1.0, -1.0, 9.0], "current": [-0.5, -1.5, -1.0, -7.0]}
    batch = packed([4], mu=values["current"], weight=[1.0, 1.0, 0.5, 0.0], **values)
    means, _ = build("loss", name, share=0.5).prepare([batch], [batch.mu], single_rank)
    assert (means.tokens, means.advantage, means.logp) == (3, 1, -1)


def test_metrics_are_of_counted_tokens() -> None:
    objective = Objective(section(loss=["clip"]))
    batch = packed([3], mu=[-1.0] * 3, advantages=[1.0] * 3, weight=[1.0, 1.0, 0.0])
    _, sums = objective(batch.mu + torch.tensor([0.0, 0.0, 5.0], dtype=DOUBLE), batch)
    assert float(sums["tokens"]) == 2
    assert float(sums["mismatch_abs"].sum()) == 0
    assert float(sums["mismatch_clipped"].sum()) == 0


def test_a_token_is_effective_if_it_has_weight_and_advantage_and_is_not_clipped() -> None:
    """Log-ratios 0, 1, 0, 0: ratio e is clipped; the third token has no advantage, the last no weight. Where the
    sum is 0, the trainer leaves the update out."""
    objective = Objective(section(loss=["clip"]))
    batch = packed([4], mu=[-1.0] * 4, advantages=[1.0, 1.0, 0.0, 1.0], weight=[1.0, 1.0, 1.0, 0.0])
    _, sums = objective(batch.mu + torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=DOUBLE), batch)
    assert int(sums["effective"]) == 1
    _, sums = objective(batch.mu + torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=DOUBLE), batch)
    assert int(sums["effective"]) == 0


def test_the_effective_sample_size_excludes_packed_dropped_samples() -> None:
    algo: dict[str, Any] = {"selectors": ["overlong_filter"], "hooks": ["vcpo"], "anchor": "old"}
    world = World(seed=5, scale=0.5)
    early = run(world, section(**algo), whole)
    late = run(world, section(**algo, shaping=[{"name": "kl_reward", "beta": 0.0}]), whole)
    assert early.lr_factor < 1
    assert late.lr_factor == pytest.approx(early.lr_factor, abs=1e-12)


def test_a_mini_batch_without_a_trained_token_has_no_update() -> None:
    """Late advantages: all rows are packed, and those of the second mini-batch were cut off."""
    objective = Objective(
        section(advantage="optimal_token_baseline", selectors=["overlong_filter"], minibatches=2)
    )
    samples = table(
        [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [2] * 4, truncated=torch.tensor([False, False, True, True])
    )
    plan = objective.plan(samples)
    parts = []
    for rows in ([0, 1], [2, 3]):
        part = packed([2, 2], [-1.0] * 4, old=[-1.0] * 4, sum_pi_squared=[0.4] * 4)
        part.rows = torch.tensor(rows)
        parts.append(part)
    objective.finish(plan, parts)
    assert [objective.trains([part]) for part in parts] == [True, False]
    assert plan.trained == (0, 1)


@pytest.mark.parametrize(
    ("term", "acts"),
    [
        ({"name": "kl", "beta": 0.0}, False), ({"name": "kl", "beta": 0.1}, True), ("adaptive_kl", True),
        ({"name": "kimi", "tau": 0.0}, False), ("kimi", True),
        ({"name": "entropy", "coefficient": 0.0}, False), ("entropy", True),
        ("adaptive_entropy", True), ({"name": "adaptive_entropy", "highest": 0.0}, False),
        ({"name": "value", "coefficient": 0.0}, False), ("value", True),
        ({"name": "positive_nll", "coefficient": 0.0, "correct": -1.0}, False), ("positive_nll", False),
        ({"name": "positive_nll", "correct": -1.0}, True),
        ("clip_cov", False), ("kl_cov", True), ({"name": "kl_cov", "coefficient": 0.0}, False),
        ("dro", True), ("distill", True), ("distill_pg", True),
    ],
)  # fmt: skip
def test_equal_rewards_make_an_update_only_where_a_term_acts_without_advantages(
    term: Any, acts: bool
) -> None:
    """All rewards are 0. Momentum alone would move the weights, and `effective_groups` would not be 0."""
    objective = Objective(section(loss=["clip", term]))
    plan = objective.plan(table([0.0] * 4, [0, 0, 1, 1], [2] * 4))
    assert plan.trained == (tuple(plan.rows) if acts else ())
    columns = {
        "old": [-1.0] * 8,
        "current": [-1.0] * 8,
        "entropy": [1.0] * 8,
        "values": [0.5] * 8,
        "ref": [-1.0] * 8,
    }
    part = packed([2] * 4, [-1.0] * 8, **columns)
    objective.finish(plan, [part])
    assert objective.trains([part]) is acts
    assert plan.trained == ((0, 1, 2, 3) if acts else ())


def test_a_sample_without_a_trained_token_divides_by_1() -> None:
    """Its length is 0: too old, say, or only read."""
    batch = packed([2, 2], mask=[0.0, 0.0, 1.0, 1.0], advantages=[1.0] * 4, weight=[1.0] * 4)
    for lengths in (None, torch.tensor([0, 2])):
        batch.sample_lengths = lengths
        assert View(batch, batch.mu, batch.mu).sample_lengths.tolist() == [1, 1, 2, 2]


def test_whitening_is_over_the_tokens_that_a_selector_leaves() -> None:
    """Rewards 1, 0, 0 of two tokens each. The three tokens of most entropy stay: 1, 1, 0, of mean 2/3 and deviation
    sqrt(1/3); over all six tokens it would be 1/3."""
    selector = {"name": "top_entropy", "share": 0.5}
    objective = Objective(section(loss=["reinforce"], advantage="reinforce_pp", selectors=[selector]))
    plan = objective.plan(table([1.0, 0.0, 0.0], [0, 1, 2], [2] * 3))
    part = packed([2] * 3, [-1.0] * 6, entropy=[6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    objective.finish(plan, [part])
    assert part.counted_tokens.tolist() == [True] * 3 + [False] * 3
    assert part.advantages is not None
    expected = [x / (1 / 3) ** 0.5 for x in (1 / 3, 1 / 3, -2 / 3)]
    assert part.advantages[:3].tolist() == pytest.approx(expected, rel=1e-5)


def test_over_active_divides_by_all_where_no_sample_is_active() -> None:
    """A KL term trains them all the same; divided by 1, its gradient would be six times as large."""
    for name, expected in (("token_mean", 6.0), ("sequence_mean", 2.0)):
        reducer = build("reducer", name, over="active")
        assert reducer(torch.tensor([2, 4]), torch.tensor([False, False])).denominator == expected
        assert reducer(torch.tensor([2, 4]), torch.tensor([False, True])).denominator == (
            4 if expected == 6 else 1
        )


def test_the_largest_value_of_a_group_is_that_of_one_of_its_sequences() -> None:
    """Gaps 0.1 and 0.2 in two sequences of a sample: k2 is 0.005 and 0.02, and 0.02 is not above 0.022."""
    plugin = build("correction", "rejection", kind="k2", level="group_max", high=0.022)
    part = packed([1, 1], [-1.0, -1.0], advantages=[1.0, 1.0], weight=[1.0, 1.0])
    part.rows, part.groups = torch.tensor([0, 0]), torch.tensor([0])
    anchor = part.mu + torch.tensor([0.1, 0.2], dtype=DOUBLE)
    assert plugin.prepare([part], [anchor], single_rank).tolist() == pytest.approx([0.02])


@pytest.mark.parametrize(
    "selector",
    [
        {"name": "d3s", "tokens_start": 1.0}, {"name": "rorecomp", "alpha": 0.5}, "ttrl",
        {"name": "grpo_roc", "penalty": "length"},
    ],
    ids=["d3s", "rorecomp", "ttrl", "grpo_roc"],
)  # fmt: skip
def test_selection_does_not_depend_on_the_order_of_finished_groups(selector: Any) -> None:
    """All lengths and all groups' rewards are alike: ties everywhere."""
    ids = torch.arange(32) * 7 + 1
    samples = replace(table([1.0, 0.0] * 16, [i // 8 for i in range(32)], [5] * 32), sample_ids=ids)
    order = torch.tensor([*range(16, 32), *range(16)])

    def chosen(of: Any) -> set[int]:
        plan = Objective(section(advantage="dr_grpo", selectors=[selector])).plan(of)
        return {int(of.sample_ids[row]) for row in plan.rows}

    assert chosen(samples) == chosen(samples.take(order))
    assert 0 < len(chosen(samples)) < 32


def test_before_selectors_act_on_samples_left_by_earlier_selectors() -> None:
    """ttrl leaves 4 of 8, grpo_roc half of these."""
    selectors = ["ttrl", {"name": "grpo_roc", "penalty": "length", "least": 0}]
    plan = Objective(section(selectors=selectors)).plan(table([1.0, 0.0] * 4, [0] * 8, [3] * 8))
    assert int(plan.eligible.sum()) == 2


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "vcpo", "gapo", "mc_grpo", "maxrl", "lite_ppo", "mssr", "gpg"]
)
def test_rounding_of_equal_rewards_is_no_advantage(name: str) -> None:
    rewards = torch.full((5,), 10.0)
    rewards[0] = torch.nextafter(rewards[0], torch.tensor(11.0))
    columns = {"log_weight": torch.zeros(5, dtype=DOUBLE), "score_norm": torch.ones(5, dtype=DOUBLE)}
    samples = table([10.0] * 5, [0] * 5, [3, 1, 4, 1, 5], prompt_index=torch.zeros(5).long(), **columns)
    samples = replace(samples, rewards=rewards)
    assert not build("advantage", name)(samples).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [0.0, 0.1, 0.2, 0.6, 0.7])
def test_rounding_chooses_no_window_of_gapo(start: float, dtype: torch.dtype) -> None:
    """All windows of two have the same range, so that the lowest counts: (R - Q) / rms(R - Q), n - 1 = 3, by hand."""
    rewards = torch.tensor([start + k / 10 for k in range(4)], dtype=dtype)
    advantages = build("advantage", "gapo")(replace(table([0.0] * 4, [0] * 4), rewards=rewards))
    scale = ((0.05**2 + 0.05**2 + 0.15**2 + 0.25**2) / 3) ** 0.5
    assert advantages.tolist() == pytest.approx([d / scale for d in (-0.05, 0.05, 0.15, 0.25)], rel=1e-4)


def test_dapo_drops_a_group_whose_rewards_differ_by_rounding() -> None:
    def group(rewards: list[float]) -> SampleGroup:
        return SampleGroup(0, 0, [Sample(i, 0, i, [1], 0, reward=r) for i, r in enumerate(rewards)])

    assert isinstance(build("planner", "dapo").decide(group([0.7, 0.7 + 1e-8])), Drop)
    assert isinstance(build("planner", "dapo").decide(group([0.7, 0.71])), Accept)
