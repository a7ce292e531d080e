"""Where the methods meet: what each is in its limit, and on groups, samples and masks that have nothing to teach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.registry import TABLE
from rlsys.config.algo import AlgoSection
from tests.helpers.algo_world import DOUBLE, Outcome, World, run, section, table

close = torch.testing.assert_close


def whole(rows: list[int]) -> list[list[int]]:
    return [rows]


def on_policy(world: World) -> World:
    """Nothing has moved: every policy gives its tokens the log-probs of the one that sampled them."""
    for sequence in world.sequences:
        sequence |= {name: sequence["mu"].clone() for name in ("old", "current", "ewma", "behaviour", "logp")}
    return world


def same(one: Outcome, other: Outcome) -> None:
    assert other.loss == pytest.approx(one.loss)
    assert {row for row, g in other.gradients.items() if g.any()} == {
        row for row, g in one.gradients.items() if g.any()
    }
    for row, gradient in one.gradients.items():
        close(other.gradients[row], gradient, atol=1e-12, rtol=1e-6)


def finite(outcome: Outcome) -> None:
    assert torch.isfinite(torch.tensor([outcome.loss, outcome.lr_factor, *outcome.metrics.values()])).all()
    assert all(torch.isfinite(g).all() for g in outcome.gradients.values())


# -- limits ----------------------------------------------------------------------------------------------------


def test_gapo_with_the_whole_group_as_window_is_grpo_where_the_median_is_the_mean() -> None:
    samples = table([0, 1, 2, 3, 0, 0, 1, 1], [0] * 4 + [1] * 4)
    close(build("advantage", "gapo", tau=1.0)(samples), build("advantage", "grpo")(samples))


def test_mc_grpo_over_all_is_grpo_over_the_active_where_mad_and_deviation_agree() -> None:
    """Rewards 0 1 2: median = mean, MAD = std = 1. What the median drops, the scale 3 / 2 makes up for."""
    world = World(groups=4, size=3)
    world.samples = replace(world.samples, rewards=torch.tensor([0.0, 1.0, 2.0] * 4, dtype=DOUBLE))
    robust = section(advantage={"name": "mc_grpo", "eps": 1e-12}, reducer="sequence_mean")
    plain = section(
        advantage={"name": "grpo", "eps": 0.0}, reducer={"name": "sequence_mean", "over": "active"}
    )
    same(run(world, plain, whole), run(world, robust, whole))


@pytest.mark.parametrize(
    "selector",
    [
        {"name": "d3s", "samples_start": 1.0, "tokens_start": 1.0},
        {"name": "grpo_roc", "keep": 1.0},
        {"name": "ttrl", "keep": 1.0},
        {"name": "rorecomp", "alpha": 1.0},
        "lens",
    ],
    ids=str,
)
def test_a_selector_that_keeps_all_changes_nothing(selector: Any) -> None:
    world = World()
    world.samples = replace(world.samples, transferred=torch.zeros(20, dtype=torch.bool))
    plain, selected = run(world, section(), whole), run(world, section(selectors=[selector]), whole)
    same(plain, selected)
    assert (selected.rows, selected.denominator) == (plain.rows, plain.denominator)


TIS = [
    {"name": "tis", "level": level, "normalise": n}
    for level in ("token", "sequence", "geometric")
    for n in (0, 1)
]
GEOMETRIC = {"name": "icepop", "level": "geometric", "low": 0.9999, "high": 1.0001}
"""Corrections at every level."""


@pytest.mark.parametrize("anchor", ["old", "behaviour", "interpolated", "ewma"])
@pytest.mark.parametrize(
    "correction",
    [
        *TIS,
        "icepop",
        GEOMETRIC,
        {"name": "icepop", "normalise": True},
        "opsm",
        "decoupled_ppo",
        "minpro",
        "lens",
    ],
    ids=str,
)
def test_corrections_change_nothing_on_policy(correction: Any, anchor: str) -> None:
    world = on_policy(World())
    world.samples = replace(world.samples, transferred=torch.zeros(20, dtype=torch.bool))
    plain = run(world, section(), whole)
    corrected = run(world, section(anchor=anchor, corrections=[correction]), whole)
    same(plain, corrected)
    assert corrected.metrics["rejected_share"] == 0
    assert corrected.metrics["weight_mean"] == pytest.approx(1)


@pytest.mark.parametrize("hook", ["vcpo", {"name": "brorl", "samples": 20}], ids=str)
def test_hooks_leave_the_rate_of_a_fresh_batch_of_the_usual_size(hook: Any) -> None:
    assert run(on_policy(World()), section(anchor="old", hooks=[hook]), whole).lr_factor == pytest.approx(1)


@pytest.mark.parametrize(
    "term",
    [{"name": "kl", "beta": 0.0}, {"name": "entropy", "coefficient": 0.0}, {"name": "kl", "beta": 0.0, "kind": "k1"}],
    ids=str,
)  # fmt: skip
def test_terms_of_weight_zero_change_nothing(term: Any) -> None:
    same(run(World(), section(), whole), run(World(), section(loss=["clip", term]), whole))


def test_kl_in_the_reward_of_weight_zero_changes_nothing() -> None:
    shaped = section(anchor="mu", shaping=[{"name": "kl_reward", "beta": 0.0}])
    same(run(World(), section(), whole), run(World(), shaped, whole))


# -- nothing to teach --------------------------------------------------------------------------------------------

TOKENWISE = [
    "reinforce_pp", {"name": "reinforce_pp", "beta": 0.1}, "reinforce_pp_baseline", "gae",
    {"name": "gae", "beta": 0.1}, {"name": "gae", "whiten": False}, "mssr", {"name": "mssr", "lam": 0.0},
]  # fmt: skip
SELECTORS = [
    "d3s", {"name": "d3s", "samples_start": 0.1, "tokens_start": 0.1}, "grpo_roc", "ttrl", "rorecomp", "lens",
]  # fmt: skip


def flat(reward: float, **shape: int) -> World:
    """All rewards equal."""
    world = World(**shape)
    world.samples = replace(world.samples, rewards=torch.full_like(world.samples.rewards, reward))
    return world


@pytest.mark.parametrize("reward", [0.1, 0.7, 0.9])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "gapo", "mc_grpo", "xrpo", "vcpo", "gdpo"])
def test_rewards_of_float32_that_are_equal_have_no_advantage_at_all(advantage: str, reward: float) -> None:
    """A mean that is off by a rounding error, over a deviation of the same, would be an advantage of 0.2."""
    for n in (3, 7, 33):
        samples = table(
            [reward] * n,
            [0] * n,
            log_likelihood=torch.linspace(-2, -1, n),
            transferred=torch.zeros(n, dtype=torch.bool),
        )
        signals = {"log_weight": torch.linspace(-1, 1, n), "score_norm": torch.linspace(1, 3, n)}
        weighted = replace(samples, rewards=samples.rewards.float(), **signals)
        assert not build("advantage", advantage)(weighted).any()


@pytest.mark.parametrize("reward", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("advantage", TOKENWISE, ids=str)
def test_tokens_of_equal_rewards_are_finite(advantage: Any, reward: float) -> None:
    for world in (flat(reward), flat(reward, size=1), World(size=1), flat(reward, groups=1, size=1)):
        finite(run(world, section(advantage=advantage), whole))


@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline", "mssr"])
def test_tokens_of_equal_rewards_have_no_advantage(advantage: str) -> None:
    for world in (flat(1.0), flat(1.0, size=1)):
        outcome = run(world, section(advantage=advantage), whole)
        assert outcome.loss == pytest.approx(0, abs=1e-12)


def test_reinforce_pp_baseline_of_groups_of_one_has_no_advantage() -> None:
    """A sample is its group's mean."""
    assert run(World(size=1, groups=9), section(advantage="reinforce_pp_baseline"), whole).loss == 0


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("advantage", ["grpo", "reinforce_pp"])
def test_selectors_of_equal_rewards_and_of_groups_of_one(selector: Any, advantage: str) -> None:
    for world in (flat(1.0), flat(0.0, size=1), World(size=1)):
        world.samples = replace(world.samples, transferred=torch.zeros(len(world.samples), dtype=torch.bool))
        if advantage == "grpo":  # else there is nothing to pack, and the loop skips the update
            algo = section(advantage=advantage, selectors=[selector], loss=["clip", "kl"])
        else:
            algo = section(advantage=advantage, selectors=[selector])
        finite(run(world, algo, whole))


# -- nothing is trained ------------------------------------------------------------------------------------------


def plug_ins() -> dict[str, AlgoSection]:
    """Every loss, correction, selector and estimator by itself, and reducers of both kinds."""
    variants: dict[str, dict[str, Any]] = {}
    for field, kind in (("loss", "loss"), ("corrections", "correction"), ("selectors", "selector")):
        variants |= {f"{kind} {name}": {field: [name]} for name in TABLE[kind]}
    variants["loss value"] |= {"advantage": "gae"}
    variants["loss adaptive_entropy"] = {
        "loss": [{"name": "adaptive_entropy", "coefficient": 0.1}]
    }  # starts at 0
    variants |= {f"tis normalised {t['level']}": {"corrections": [t]} for t in TIS if t["normalise"]}
    variants |= {f"advantage {name}": {"advantage": name} for name in TABLE["advantage"]}
    variants |= {f"reducer {name}": {"reducer": name} for name in TABLE["reducer"]}
    variants["reducer active"] = {"reducer": {"name": "token_mean", "over": "active"}}
    variants["m2po mask"] = {"loss": [{"name": "m2po", "form": "mask"}]}
    return {name: section(anchor="old", **fields) for name, fields in variants.items()}


@pytest.mark.parametrize("name", list(plug_ins()))
def test_masks_without_a_trained_token(name: str) -> None:
    """All responses were masked, as too old; then one of them."""
    graded = name == "advantage grpo_passk"
    world = World(graded=graded)
    for sequence in world.sequences:
        sequence["mask"] = torch.zeros_like(sequence["mask"])
    world.samples = replace(world.samples, lengths=torch.zeros(20, dtype=torch.long))
    outcome = run(world, plug_ins()[name], whole)
    finite(outcome)
    assert outcome.loss == 0
    assert not any(g.any() for g in outcome.gradients.values())

    world = World(graded=graded)
    lengths = world.samples.lengths.clone()
    row = run(world, plug_ins()[name], whole).rows[0]
    world.sequences[row]["mask"] = torch.zeros_like(world.sequences[row]["mask"])
    lengths[row] = 0
    world.samples = replace(world.samples, lengths=lengths)
    outcome = run(world, plug_ins()[name], whole)
    finite(outcome)
    assert row not in outcome.gradients or not outcome.gradients[row].any()
    assert any(g.any() for g in outcome.gradients.values())
