"""The composition: what is trained, in which order, and that no layout changes it. Every shipped recipe is a case."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from rlsys.algo.advantages import grpo
from rlsys.algo.batch import Samples
from rlsys.algo.figures import loss_metrics
from rlsys.algo.losses import clipped_surrogate, gradient_is_clipped
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import threshold
from rlsys.config import read_layers
from rlsys.config.algo import AlgoSection
from tests.helpers.algo_world import DOUBLE, Outcome, World, on_ranks, packed, run, section, table

RECIPES = sorted((Path(__file__).resolve().parents[3] / "configs/algorithms").glob("*.yaml"))


def recipe(path: Path) -> AlgoSection:
    return AlgoSection.model_validate(read_layers(path).get("algo", {}))


def whole(rows: list[int]) -> list[list[int]]:
    return [rows]


def same(one: Outcome, gradients: dict[int, Tensor], other: Outcome) -> None:
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert other.lr_factor == pytest.approx(one.lr_factor, abs=1e-6)
    assert other.metrics == pytest.approx(one.metrics, abs=1e-6)
    assert gradients.keys() == one.gradients.keys()
    for row, gradient in one.gradients.items():
        torch.testing.assert_close(gradients[row], gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_gives_the_same_however_it_is_cut(path: Path) -> None:
    """One part, one part per sequence, two ranks with several parts: loss, gradients and metrics agree."""
    world, algo = World(graded=path.stem == "grpo_passk"), recipe(path)
    reference = run(world, algo, whole)
    assert all(torch.isfinite(g).all() for g in reference.gradients.values())
    assert any(g.abs().sum() > 0 for g in reference.gradients.values())
    many = run(world, algo, lambda rows: [[r] for r in rows])
    same(reference, many.gradients, many)
    ranks = on_ranks(
        2, lambda rank, reduce: run(world, algo, lambda rows: [[r] for r in rows[rank::2]], reduce)
    )
    for outcome in ranks:
        same(reference, ranks[0].gradients | ranks[1].gradients, outcome)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
@pytest.mark.parametrize("scale", [0.0, 50.0])
def test_every_recipe_is_finite_on_extreme_log_ratios(path: Path, scale: float) -> None:
    """Log-ratios of 0 and of about +-50 per token, in float64."""
    outcome = run(World(scale=scale), recipe(path), whole)
    assert all(torch.isfinite(g).all() for g in outcome.gradients.values())
    assert all(torch.isfinite(torch.tensor(v)) for v in outcome.metrics.values())


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_changes_something_about_the_step(path: Path) -> None:
    """Against plain GRPO with a clip, token mean: another loss, another choice, or only what the rollout does."""
    algo = recipe(path)
    world = World(scale=0.7)
    world.samples = replace(world.samples, lengths=25 * world.samples.lengths)  # some are near the cap of 256
    base, outcome = run(world, AlgoSection(), whole), run(world, algo, whole)
    trainer_side = algo.model_copy(
        update={"planners": [], "prompt": AlgoSection().prompt, "group_reward": None}
    )
    if trainer_side == AlgoSection():
        assert outcome.loss == base.loss
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert algo != AlgoSection() or "data" in fields or "generator" in fields.get("rollout", {})
    elif path.stem == "gdpo":  # with one reward it is GRPO, on purpose
        assert outcome.loss == pytest.approx(base.loss)
    else:
        assert (outcome.loss, outcome.lr_factor, outcome.rows) != (base.loss, base.lr_factor, base.rows)


ACTIVE = {"name": "token_mean", "over": "active"}
HALF_FLAT = ([1, 0, 1, 1], [0, 0, 1, 1], [3, 4, 5, 6])
"""A group that teaches something, of 7 tokens, and one of equal rewards, of 11."""


def test_samples_of_advantage_zero_are_not_packed_but_counted() -> None:
    plan = Objective(section()).plan(table(*HALF_FLAT))
    assert plan.rows == [0, 1]
    assert plan.denominator == 18
    active = Objective(section(reducer=ACTIVE)).plan(table(*HALF_FLAT))
    assert active.rows == [0, 1]
    assert active.denominator == 7


@pytest.mark.parametrize("over", ["all", "active"])
@pytest.mark.parametrize("loss", [["clip"], ["clip", "kl"], ["clip", "entropy"]])
def test_no_term_of_the_loss_changes_the_denominator(over: str, loss: list[str]) -> None:
    """A KL or entropy term acts on samples of advantage 0, too: they are packed, and counted as ever."""
    objective = Objective(section(reducer={"name": "token_mean", "over": over}, loss=loss))
    plan = objective.plan(table(*HALF_FLAT))
    assert plan.rows == ([0, 1] if loss == ["clip"] else [0, 1, 2, 3])
    assert plan.denominator == (18 if over == "all" else 7)


REDUCERS = [
    {"name": n, "over": o} for n in ("token_mean", "sequence_mean", "constant") for o in ("all", "active")
]
POOLING: list[dict[str, Any]] = [
    *({"reducer": reducer} for reducer in REDUCERS),
    {"loss": [{"name": "m2po", "form": "mask"}]},
    {"loss": ["m2po"]},
    {"loss": ["bapo"]},
    {"anchor": "old", "corrections": [{"name": "tis", "normalise": True}]},
    {"anchor": "old", "corrections": [{"name": "tis", "normalise": True, "level": "sequence"}]},
    {"anchor": "old", "corrections": [{"name": "icepop", "normalise": True}]},
    {"selectors": [{"name": "d3s", "tokens_start": 0.5, "samples_start": 1.0}]},
]
"""What is computed from all tokens of an update."""


@pytest.mark.parametrize("algo", POOLING, ids=str)
def test_a_term_of_weight_zero_changes_nothing(algo: dict[str, Any]) -> None:
    """It has samples of advantage 0 packed, whose log-ratios are other ones than those of the others."""
    world, losses = World(), algo.get("loss", ["clip"])
    world.samples = replace(world.samples, rewards=world.samples.rewards.index_fill(0, torch.arange(5), 1.0))
    for sequence in world.sequences[:5]:
        for name in ("old", "current", "logp"):
            sequence[name] = sequence["mu"] + 0.01 * (sequence[name] - sequence["mu"])
    plain = run(world, section(**algo), whole)
    assert len(plain.rows) < 20
    for term in ({"name": "kl", "beta": 0.0}, {"name": "entropy", "coefficient": 0.0}):
        outcome = run(world, section(**{**algo, "loss": [*losses, term]}), whole)
        assert (outcome.loss, outcome.denominator) == (pytest.approx(plain.loss), plain.denominator)
        assert len(outcome.rows) == 20
        for row in plain.rows:
            torch.testing.assert_close(outcome.gradients[row], plain.gradients[row])


def test_the_active_denominator_is_computed_with_late_advantages() -> None:
    """Five samples of equal rewards, five of others; the baseline needs log-probs of the trainer."""
    world = World(groups=2)
    world.samples = replace(world.samples, rewards=torch.tensor([1.0] * 6 + [0.0] * 4, dtype=DOUBLE))
    algo = section(advantage="vcpo", reducer=ACTIVE)
    assert run(world, algo, whole).denominator == world.samples.lengths[5:].sum()


def test_mc_grpo_compensates_for_its_median_sample_once() -> None:
    """0 1 2: (R - 1) / (1 + eps) times 3 / 2. The mean over all three samples is that of two without the factor."""
    samples = table([0, 1, 2], [0, 0, 0], [4, 4, 4])
    objective = Objective(section(advantage={"name": "mc_grpo", "eps": 1e-12}, reducer="sequence_mean"))
    plan = objective.plan(samples)
    assert plan.rows == [0, 2]
    assert plan.advantages is not None
    assert plan.advantages[plan.rows].tolist() == pytest.approx([-1.5, 1.5])
    assert plan.denominator == 3  # 1.5 / 3 = 1 / 2


def test_selection_and_rejection_leave_the_denominator() -> None:
    world = World()
    plain = run(world, section(), whole)
    d3s = {"name": "d3s", "samples_start": 0.3, "tokens_start": 0.3, "denominator": "all"}
    picked = run(world, section(selectors=[d3s]), whole)
    masked = run(
        world, section(anchor="old", corrections=[{"name": "icepop", "low": 0.9, "high": 1.1}]), whole
    )
    assert picked.denominator == masked.denominator == plain.denominator
    assert len(picked.rows) < len(plain.rows)
    assert masked.metrics["rejected_share"] > 0.1


@pytest.mark.parametrize("reducer", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("loss", [["clip"], ["clip", "kl"]])
def test_d3s_averages_over_kept_samples_so_selection_enlarges_gradients(
    reducer: str, loss: list[str]
) -> None:
    """Sum of |weight A| / denominator: the mean |A| of what is trained. Which samples are packed (all, with a KL
    term) does not change what is kept, nor the denominator."""
    world = World(groups=8, size=8)

    def size(**fields: object) -> tuple[float, float, int]:
        objective = Objective(section(reducer=reducer, loss=loss, anchor="old", **fields))
        plan = objective.plan(world.samples)
        part = world.part(plan.rows)
        objective.finish(plan, [part])
        assert part.weight is not None and part.advantages is not None
        active = part.weight * part.advantages
        return float(active.abs().sum()) / plan.denominator, plan.denominator, int((active != 0).sum())

    d3s = {"name": "d3s", "samples_start": 0.5, "tokens_start": 0.2}
    plain, denominator, _ = size()
    selected_mean, less, tokens = size(selectors=[d3s])
    assert less < 0.2 * denominator
    assert selected_mean > plain
    assert selected_mean == pytest.approx(1.2, rel=0.3)  # of advantages around 1
    samples = world.samples
    assert tokens == pytest.approx(0.2 * 0.5 * float(samples.lengths.sum()), rel=0.2)


def test_baselines_exclude_samples_dropped_by_a_before_selector() -> None:
    """Baselines and the denominator are those of the kept samples."""
    samples = table([1, 1, 0, 0], [0, 0, 0, 0], [1, 9, 2, 3], tool_penalty=torch.tensor([0.0, 1.0, 0.0, 0.0]))
    objective = Objective(
        section(selectors=[{"name": "grpo_roc", "keep": 0.5, "least": 1}], advantage="dr_grpo")
    )
    plan = objective.plan(samples)
    assert plan.rows[0] == 0 and 1 not in plan.rows
    assert plan.advantages is not None
    assert plan.advantages[plan.rows].tolist() == [0.5, -0.5]
    assert plan.denominator == samples.lengths[plan.rows].sum()


def test_rorecomp_defers_the_unselected_samples() -> None:
    samples = table([1, 1, 1, 1, 0, 0, 0, 0], [0] * 8, [5, 1, 9, 3, 4, 8, 2, 6])
    plan = Objective(section(selectors=[{"name": "rorecomp", "alpha": 0.5}])).plan(samples)
    assert plan.rows == [1, 3, 5, 7]  # the short correct, the long wrong
    assert plan.deferred == [0, 2, 4, 6]


def test_two_updates_share_the_denominator() -> None:
    """Each divides by half of it: with the same log-probs, their losses and gradients are twice those of one."""
    one_update, two_updates = run(World(), section(), whole), run(World(), section(minibatches=2), whole)
    assert (two_updates.denominator, two_updates.rows) == (one_update.denominator, one_update.rows)
    assert two_updates.loss == pytest.approx(2 * one_update.loss)
    for row, gradient in one_update.gradients.items():
        torch.testing.assert_close(two_updates.gradients[row], 2 * gradient)


def test_bounds_of_a_second_update_use_its_own_logprobs() -> None:
    """M2PO: a log-ratio of 0.1 is within the budget of 0.04, one of 0.5 gives a cap of 0.2: then it is clipped."""
    objective = Objective(section(loss=["m2po"]))
    batch = packed([1], advantages=[1.0], weight=[1.0])
    shares = []
    for logp in (0.1, 0.5):
        batch.current = torch.tensor([logp], dtype=DOUBLE)
        objective.prepare([batch])
        sums = objective(torch.tensor([0.5], dtype=DOUBLE), batch)[1]
        shares.append(loss_metrics(sums, objective.requirements.needs)["clip_share"])
    assert shares == [0, 1]


def test_the_extra_update_trains_deferred_samples_with_their_group_advantages() -> None:
    """Four of the samples that alpha leaves, the oldest, over their own denominator."""
    alpha = {"name": "rorecomp", "alpha": 0.5}
    world, plain = World(), run(World(), section(selectors=[{**alpha, "capacity": 99}]), whole)
    outcome = run(world, section(selectors=[{**alpha, "capacity": 4}]), whole)
    rows = outcome.rows[len(plain.rows) :]
    assert len(rows) == 4 and not set(rows) & set(plain.rows)
    for row in plain.rows:
        torch.testing.assert_close(outcome.gradients[row], plain.gradients[row])
    every = run(world, section(), whole)
    scale = every.denominator / float(world.samples.lengths[rows].sum())
    for row in rows:
        torch.testing.assert_close(outcome.gradients[row], scale * every.gradients[row])


def test_needs_name_exactly_the_passes() -> None:
    assert Objective(section()).requirements.passes == frozenset()
    assert Objective(section(anchor="old")).requirements.passes == {"old"}
    assert Objective(section(loss=["m2po"])).requirements.passes == {"current"}
    assert Objective(section(loss=["clip", "kl", "entropy"])).requirements.passes == {"ref", "entropy"}
    assert Objective(section(anchor="behaviour")).requirements.passes == {"old", "behaviour"}


def test_a_missing_signal_is_named() -> None:
    samples, batch = table([1, 0], [0, 0], [1, 1]), packed([1, 1])
    with_weight = Objective(section(anchor="old", advantage="vcpo"))
    with pytest.raises(ValueError, match="'old'"):
        with_weight.finish(with_weight.plan(samples), [batch])
    objective = Objective(section(anchor="old"))
    objective.finish(objective.plan(samples), [batch])
    with pytest.raises(ValueError, match="'old'"):
        objective(batch.mu, batch)


def test_the_anchor_between_mu_and_current_by_version() -> None:
    """AReaL: alpha = (age - 1) / age and 0 up to an age of 1: for ages 0, 1, 2, 4 it is 0, 0, 1/2, 3/4."""
    batch = packed([5], mu=[-1.0] * 5, versions=[7.0, 6.0, 5.0, 3.0, -1.0])
    batch.version = 7
    anchor = Objective(section(anchor="interpolated")).anchor_of(
        batch, torch.tensor([-5.0] * 5, dtype=DOUBLE)
    )
    torch.testing.assert_close(anchor[:4], torch.tensor([-1.0, -1.0, -3.0, -4.0], dtype=DOUBLE))


def test_at_an_age_of_one_the_clip_bounds_the_whole_ratio() -> None:
    """clip 0.2: a ratio of 1.25 to mu, one version old, A > 0, is clipped; its square root of 1.118 would not be."""
    objective = Objective(section(anchor="interpolated", loss=[{"name": "clip", "clip_high": 0.2}]))
    batch = packed([1], mu=[-1.0], versions=[6.0], advantages=[1.0], weight=[1.0])
    batch.version = 7
    logp = torch.tensor([-1.0 + math.log(1.25)], dtype=DOUBLE)
    assert loss_metrics(objective(logp, batch)[1], objective.requirements.needs)["clip_share"] == 1


def test_behaviour_falls_back_to_old_and_counts_it() -> None:
    batch = packed(
        [3], behaviour=[-1.0, torch.nan, torch.nan], old=[-2.0, -3.0, -4.0], versions=[1.0, 1.0, 7.0]
    )
    batch.version = 7
    objective = Objective(section(anchor="behaviour"))
    assert objective.anchor_of(batch, batch.mu).tolist() == [-1.0, -3.0, -4.0]
    objective.finish(objective.plan(table([1], [0], [3])), [batch])
    sums = objective(torch.zeros(3, dtype=DOUBLE), batch)[1]
    assert sums["anchor_missing"] == 1  # the token of version 7 is exact: old is its own


def test_early_backward_of_finished_groups_adds_up_to_the_whole_step() -> None:
    world = World()
    algo = section(advantage="dr_grpo", reducer={"name": "constant", "length": 9})
    objective = Objective(algo)
    assert not objective.requirements.needs_whole_step
    assert not Objective(section()).requirements.needs_whole_step
    assert Objective(section(loss=["bapo"], hooks=["vcpo"])).requirements.needs_whole_step == (
        "bapo",
        "vcpo",
    )
    assert Objective(section(advantage="reinforce_pp_baseline")).requirements.needs_whole_step == (
        "reinforce_pp_baseline",
    )
    reference = run(world, algo, whole)
    total, gradients = 0.0, {}
    for g in range(world.groups):
        rows = list(range(g * world.size, (g + 1) * world.size))
        alone_samples = world.samples.take(torch.tensor([r in rows for r in range(20)]))
        plan = objective.plan(alone_samples)
        part = world.part([rows[i] for i in plan.rows])
        part.rows = torch.tensor(plan.rows)
        objective.finish(plan, [part])
        logp = torch.cat([world.sequences[rows[i]]["logp"] for i in plan.rows]).requires_grad_()
        loss = objective(logp, part)[0] / (20 * 9)
        loss.backward()
        total += float(loss.detach())
        assert logp.grad is not None
        for i, piece in zip(
            plan.rows, logp.grad.split([len(world.sequences[rows[i]]["mu"]) for i in plan.rows]), strict=True
        ):
            gradients[rows[i]] = piece
    assert total == pytest.approx(reference.loss)
    for row, piece in gradients.items():
        torch.testing.assert_close(piece, reference.gradients[row][0])


def test_plugin_state_survives_a_checkpoint() -> None:
    algo = section(advantage={"name": "mssr", "lam": 0.0})
    first, samples = Objective(algo), World(size=1, groups=8).samples
    first.plan(samples)
    first.after_step(list, {"active_share": 1.0, "policy_kl": 0.02})
    second = Objective(algo)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first.plan(samples).advantages, second.plan(samples).advantages)
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize("values", [[0.1, 0.5, 0.9, 3.0], [2.0] * 5, [0.0], []])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_threshold_matches_the_result_of_sorting(values: list[float], share: float) -> None:
    """Largest cut with at most `share` of the values at or below it."""
    tensor = torch.tensor(values, dtype=DOUBLE)

    def holds(edges: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
        return counts <= share * len(values)

    cut = threshold([tensor], holds, 0.0, 4.0, lambda t: t)
    assert (tensor <= cut).sum() <= share * len(values) or cut == 0.0
    above = tensor[tensor > cut]
    assert len(above) == 0 or (tensor <= above.min()).sum() > share * len(values)


def test_samples_name_a_column_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"tool_penalty has shape \(2,\); expected 3 rows"):
        Samples(
            rewards=torch.zeros(3),
            group_ids=torch.zeros(3),
            lengths=torch.ones(3),
            tool_penalty=torch.zeros(2),
        )


def test_one_process_equals_ranks_of_any_number() -> None:
    world, algo = World(groups=6), section(loss=[{"name": "m2po", "form": "mask"}])
    reference = run(world, algo, whole)
    cut: Callable[[int], Callable[[list[int]], list[list[int]]]] = lambda k: lambda rows: [rows[k::3]]  # noqa: E731
    ranks = on_ranks(3, lambda rank, reduce: run(world, algo, cut(rank), reduce))
    merged = {row: g for r in ranks for row, g in r.gradients.items()}
    same(reference, merged, ranks[2])
    assert reference.metrics["clip_share"] > 0


def test_the_default_is_the_plain_clipped_loss_on_grpo_advantages() -> None:
    """The whole composition against the pure functions that it is made of."""
    world = World()
    outcome = run(world, section(), whole)
    part = world.part(outcome.rows)
    advantages = part.expand(grpo(world.samples.reward, world.samples.group_ids))
    logp = torch.cat([world.sequences[r]["logp"] for r in outcome.rows])
    keep = part.mask > 0
    ratio = torch.where(keep, logp - part.mu, torch.zeros_like(logp)).exp()
    loss = (clipped_surrogate(ratio, advantages, 0.8, 1.28) * part.mask).sum()
    assert outcome.loss == pytest.approx(float(loss / world.samples.lengths.sum()), abs=1e-12)
    assert (
        outcome.sums["mismatch_clipped"].sum()
        == (gradient_is_clipped(ratio, advantages, 0.8, 1.28) & keep).sum()
    )
    assert outcome.denominator == world.samples.lengths.sum()
