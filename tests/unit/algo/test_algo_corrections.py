"""Corrections, selectors, shaping, reducers, hooks, mismatch: numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.corrections import Correction
from rlsys.algo.figures import loss_metrics, mismatch_metrics, mismatch_sums
from rlsys.algo.losses import View
from rlsys.algo.methods.d3s import widest_subset
from rlsys.algo.methods.deferred_samples import DeferredSamples
from rlsys.algo.methods.vcpo import effective_share
from rlsys.algo.objective import Objective
from rlsys.algo.reduction import single_rank
from tests.helpers.algo_world import DOUBLE, packed, section, table

close = torch.testing.assert_close
LOG2 = math.log(2)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def correct(
    name: str, batch: Batch, anchor: list[float], logp: list[float] | None = None, **params: object
) -> Correction:
    plugin, prox = build("correction", name, **params), vector(*anchor)
    update_stats = plugin.prepare([batch], [prox], single_rank)
    current_logp = prox if logp is None else vector(*logp)
    correction: Correction = plugin(View(batch, current_logp, prox), update_stats)
    return correction


def test_tis_by_hand() -> None:
    """rho = 2, 1/2, 8 with cap 2; the product of the sequence (2 * 1/2, 8) and its geometric mean."""
    batch, anchor = packed([2, 1], advantages=[1, 1, -1]), [LOG2, -LOG2, 3 * LOG2]
    close(correct("tis", batch, anchor).weight, vector(2, 0.5, 2))
    close(correct("tis", batch, anchor, level="sequence", cap=8.0).weight, vector(1, 1, 8))
    close(correct("tis", packed([2]), [LOG2, LOG2 * 3], level="geometric", cap=8.0).weight, vector(4, 4))
    close(correct("tis", batch, anchor, normalise=True).weight, vector(2, 0.5, 2) / 1.5)


def test_icepop_by_hand() -> None:
    batch, anchor = packed([2, 1]), [LOG2, -3 * LOG2, 0.0]
    correction = correct("icepop", batch, anchor)
    assert correction.keep.tolist() == [True, False, True]
    close(correction.weight[correction.keep], vector(2, 1))
    plain = correct("icepop", batch, anchor, weighted=False)
    close(plain.weight, vector(1, 1, 1))
    # geometric mean of the first sequence: sqrt(2 / 8) = 1/2 < 0.9
    assert correct("icepop", batch, anchor, level="geometric", low=0.9, high=1.1).keep.tolist() == [
        False,
        False,
        True,
    ]
    # one token at 1/8 < 0.2 vetoes its sequence
    assert correct("icepop", batch, anchor, low=0.1, veto=0.2).keep.tolist() == [False, False, True]


def test_icepop_normalises_over_kept_tokens_by_hand() -> None:
    """2 and 1 are kept, 1/8 is not: their mean is 1.5. Nothing kept: nothing divided."""
    batch, anchor = packed([2, 1], advantages=[1, 1, -1]), [LOG2, -3 * LOG2, 0.0]
    correction = correct("icepop", batch, anchor, normalise=True)
    assert correction.keep.tolist() == [True, False, True]
    close(correction.weight[correction.keep], vector(2, 1) / 1.5)
    assert not correct("icepop", packed([1], advantages=[1]), [-9.0], normalise=True).keep.any()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("gaps", [[50.0, -50.0, -50.0], [-50.0] * 3, [50.0] * 3])
def test_tis_normalise_at_log_ratios_of_fifty_has_mean_one(level: str, gaps: list[float]) -> None:
    correction = correct("tis", packed([2, 1], advantages=[1, 1, -1]), gaps, level=level, normalise=True)
    assert torch.isfinite(correction.weight).all()
    assert correction.weight.mean() == pytest.approx(1)


def test_tis_normalise_between_mu_and_current_needs_the_current_log_probs_by_hand() -> None:
    """Halfway to now - mu = 2 ln 2 on the token of the version before: weights 2 and 1, mean 1.5."""
    algo = section(anchor="interpolated", corrections=[{"name": "tis", "normalise": True}])
    objective = Objective(algo)
    assert objective.requirements.passes == {"current"}
    assert not Objective(section(anchor="interpolated", corrections=["tis"])).requirements.passes
    batch = packed([2], versions=[0.0, 1.0], current=[2 * LOG2, 2 * LOG2])
    batch.version = 1
    objective.finish(objective.plan(table([1, 0], [0, 0], [2, 2])), [batch])
    objective.prepare([batch])
    sums = objective(batch.signal("current"), batch)[1]
    assert sums["weight"] == pytest.approx(2)


def test_opsm_by_hand() -> None:
    """Mean of mu - logp: 0.1 for the first and the second; only the second has A < 0. The anchor has moved as far."""
    batch = packed([2, 2, 1], mu=[0.2, 0.0, 0.2, 0.0, 0.0], advantages=[1, 1, -1, -1, -1])
    correction = correct("opsm", batch, [0.0] * 5, logp=[0.0] * 5, delta=0.05)
    assert correction.keep.tolist() == [True, True, False, False, True]


def test_opsm_acts_where_the_anchor_has_moved_along() -> None:
    """The wrong sample's policy is 2 nats below the sampler. Its distance from `old` is 0, which rejects nothing."""
    objective = Objective(section(anchor="old", corrections=["opsm"]))
    logp = vector(-1, -1, -3, -3)
    batch = packed([2, 2], mu=[-1.0] * 4, old=logp.tolist())
    objective.finish(objective.plan(table([1, 0], [0, 0], [2, 2])), [batch])
    leaf = logp.clone().requires_grad_()
    objective(leaf, batch)[0].backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert (leaf.grad != 0).tolist() == [True, True, False, False]


def test_without_a_ratio_corrections_follow_the_policy_through_a_step() -> None:
    """Second update of a step: mu -> old is ln 2, old -> now another ln 2. The weight is 4, the gradient -4 A."""
    for anchor in ("mu", "old"):
        algo = section(
            anchor=anchor, loss=["reinforce"], corrections=[{"name": "tis", "cap": 9.0}], minibatches=2
        )
        batch = packed([1], mu=[0.0], old=[LOG2], advantages=[1.0], weight=[1.0])
        leaf = vector(2 * LOG2).requires_grad_()
        Objective(algo)(leaf, batch)[0].backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        close(leaf.grad, vector(-4))


def test_decoupled_ppo_by_hand() -> None:
    batch, anchor = packed([3]), [LOG2, 3 * LOG2, -LOG2]
    masked, clamped = (
        correct("decoupled_ppo", batch, anchor),
        correct("decoupled_ppo", batch, anchor, above="clamp"),
    )
    assert masked.keep.tolist() == [True, False, True]
    close(masked.weight, vector(2, 5, 0.5))
    assert clamped.keep.all()
    close(clamped.weight, vector(2, 5, 0.5))


def test_minpro_by_hand() -> None:
    """Ratios 1/2, 2, 1/4 | 2, 2: smallest before each token 1, 1/2, 1/2 | 1, 2 (cut at the cap of 1)."""
    batch, logp = packed([3, 2]), [-LOG2, LOG2, -2 * LOG2, LOG2, LOG2]
    close(correct("minpro", batch, [0.0] * 5, logp=logp).weight, vector(1, 0.5, 0.5, 1, 1))
    close(correct("minpro", batch, [0.0] * 5, logp=logp, cap=None).weight, vector(1, 0.5, 0.5, 1, 2))
    weight = correct("minpro", batch, [0.0] * 5, logp=logp, inclusive=True, cap=None).weight
    close(weight, vector(0.5, 0.5, 0.25, 2, 2))


def test_minpro_uses_the_ratio_to_the_behaviour_policy() -> None:
    """Log-ratios -ln 2, 0: the second token has the first one's 1/2, whatever mu is."""
    batch = packed([2], [-0.3, -1.2])
    weight = correct("minpro", batch, [0.0] * 2, logp=[-0.3 - LOG2, -1.2]).weight
    close(weight, vector(1, 0.5))


def test_minpro_ignores_masked_tokens() -> None:
    batch = packed([3], mask=[1.0, 0.0, 1.0])
    close(correct("minpro", batch, [0.0] * 3, logp=[0.0, -9.0, 0.0]).weight[batch.keep], vector(1, 1))


LENS_REWARDS = [*[0, 0, 0, 1, 1, 0, 1, 0], *[1, 0, 0, 1], *[0, 1], *[0, 0, 1, 1, 1]]
LENS_GROUPS = [0] * 8 + [1] * 4 + [2] * 2 + [3] * 5
LENS_MOVED = torch.tensor([False] * 4 + [True] * 4 + [False] * 2 + [True] * 2 + [False] * 4 + [True] * 3)
"""A group of 1/4 whose cleaned prompt had 2/4; one of 1/2 with 1/2; one that was not cleaned; one of 0 with 3/3."""


def test_lens_replaces_failures_where_cleaning_helped_by_hand() -> None:
    """Two successes for two of three failures; nothing, as 1/2 is not above 1/2; as before; two for two failures."""
    keep = build("selector", "lens")(table(LENS_REWARDS, LENS_GROUPS, transferred=LENS_MOVED), None)
    assert keep.tolist() == [*[0, 0, 1, 1, 1, 0, 1, 0], *[1, 1, 0, 0], *[1, 1], *[0, 0, 1, 1, 0]]


def test_lens_weighs_only_groups_that_hold_transferred_samples_by_hand() -> None:
    """a = 1/4: success 1/4, what is left 3/4. Own successes of a group without any are 1, as in any other group.
    a = 0: 1 for all."""
    samples = table(LENS_REWARDS, LENS_GROUPS, transferred=LENS_MOVED)
    samples = replace(samples, eligible=build("selector", "lens")(samples, None) > 0)
    plugin = build("correction", "lens")
    weight = plugin.sample_weight(samples)
    close(weight, vector(*[0.75] * 3, 0.25, *[0.75] * 4, *[1.0] * 6, *[1.0] * 5))
    close(plugin.shift(packed([1] * 19), samples), weight.log())
    rare = table([1] + [0] * 19 + [1], [0] * 21, transferred=torch.arange(21) == 20)
    close(plugin.sample_weight(rare), vector(0.1, *[0.95] * 20))  # a = 1/20, but at least 0.1


def test_lens_baseline_and_denominator_use_the_remaining_samples() -> None:
    """First group: 0 1 | 1 1, mean 3/4. The last one has only successes left. Lengths 1 to 19, by their places."""
    samples = table(LENS_REWARDS, LENS_GROUPS, list(range(1, 20)), transferred=LENS_MOVED)
    objective = Objective(section(advantage="dr_grpo", selectors=["lens"], corrections=["lens"]))
    plan = objective.plan(samples)
    assert plan.rows == [2, 3, 4, 6, 8, 9, 12, 13]
    assert plan.advantages is not None
    assert plan.advantages[plan.rows].tolist() == [-0.75, 0.25, 0.25, 0.25, 0.5, -0.5, -0.5, 0.5]
    assert plan.denominator == (3 + 4 + 5 + 7) + (9 + 10) + (13 + 14) + (17 + 18)


def test_lens_weight_does_not_cancel_in_tis() -> None:
    """r = exp(logp - old) / w and rho = exp(old - mu): were w in both, it would cancel."""
    batch = packed([1, 1], old=[LOG2, LOG2], advantages=[1.0, 1.0])
    batch.shift = vector(math.log(0.5), 0)
    view = View(batch, vector(LOG2, LOG2), batch.signal("old") + batch.shift)
    close(view.ratio, vector(2, 1))
    close(build("correction", "tis")(view, None).weight, vector(2, 2))


def test_weights_are_detached_and_rejections_are_not_weights() -> None:
    batch = packed([2], advantages=[1.0, 1.0])
    leaf = vector(1, -9).requires_grad_()
    for name in ("tis", "icepop", "opsm", "decoupled_ppo", "minpro"):
        weight, keep = build("correction", name)(View(batch, leaf, leaf.detach()), None)
        assert not weight.requires_grad
        assert (weight[keep] > 0).all()


# -- selectors -----------------------------------------------------------------------------------------------


def test_widest_subset_equals_trying_all() -> None:
    values = torch.randn(8, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    for count in range(1, 9):
        best = max(
            float(values[list(c)].var(unbiased=False)) for c in itertools.combinations(range(8), count)
        )
        keep = widest_subset(values, count, torch.rand(8))
        assert keep.sum() == count
        assert float(values[keep].var(unbiased=False)) == pytest.approx(best)


def test_d3s_by_hand() -> None:
    """Half of the samples: the ends -3 and 3. Half of the tokens: the largest |A| H of those trained."""
    samples = table([0, 0, 0, 0], [0] * 4, [2, 7, 7, 2])
    plugin = build("selector", "d3s", tokens_start=0.5)
    weight = plugin(samples, vector(-3, 1, 0, 3))
    assert weight.tolist() == [1, 0, 0, 1]
    batch = packed([2, 2], advantages=[1, -2, 1, 1], entropy=[0.1, 0.2, 0.3, 9], weight=[1.0, 1, 1, 0])
    (token_weight,) = plugin.per_token([batch], replace(samples, selected=weight > 0), single_rank)
    assert (token_weight * batch.weight).tolist() == [
        0,
        1,
        1,
        0,
    ]  # scores 0.1, 0.4, 0.3; two of the four tokens
    assert plugin.denominator_share(weight, samples.lengths.double(), 0) == 4 / 18 * 0.5
    everything = build("selector", "d3s", denominator="all")
    assert everything.denominator_share(weight, samples.lengths.double(), 0) == 1


def test_d3s_relaxes_with_time() -> None:
    late = Samples(rewards=torch.zeros(4), group_ids=torch.zeros(4), lengths=torch.ones(4), step=1000)
    plugin = build("selector", "d3s")
    assert plugin(late, vector(-3, 1, 0, 3)).tolist() == [1, 1, 1, 1]
    assert plugin.per_token([], late, single_rank) is None


@pytest.mark.parametrize(
    ("won", "lost", "total", "kept"),
    [(6, 2, 4, 2), (4, 4, 4, 2), (8, 0, 4, 4), (0, 8, 4, 0), (1, 7, 4, 1), (7, 1, 4, 3)],
)
def test_grpo_roc_keeps_the_proportion_but_two_of_each(won: int, lost: int, total: int, kept: int) -> None:
    rewards = [1] * won + [0] * lost
    errors = torch.linspace(0, 1, won + lost, dtype=DOUBLE)
    weight = build("selector", "grpo_roc", keep=total / (won + lost))(
        table(rewards, [0] * len(rewards), tool_penalty=errors), None
    )
    assert weight[:won].tolist() == [1.0] * kept + [0.0] * (won - kept)  # the cleanest successes come first
    assert weight.sum() == total


def test_ttrl_trains_a_share_of_the_votes() -> None:
    weight = build("selector", "ttrl")(table([1] * 16, [0] * 8 + [1] * 8), None)
    assert weight[:8].sum() == weight[8:].sum() == 4


def test_deferred_samples_are_fifo_age_bounded_and_resumable() -> None:
    store: DeferredSamples[str] = DeferredSamples(capacity=2, max_age=3)
    store.add(1, ["a"])
    assert store.take(1) == []
    store.add(3, ["b", "c"])
    again: DeferredSamples[str] = DeferredSamples(capacity=2, max_age=3)
    again.load_state_dict(store.state_dict(str), str)
    assert again.take(4) == ["a", "b"]
    assert store.take(5) == ["b", "c"]  # "a" is four steps old
    assert (store.expired, len(store), len(again)) == (1, 0, 1)


# -- shaping, reducers, hooks --------------------------------------------------------------------------------


def test_overlong_by_hand() -> None:
    shaped = build("shaping", "overlong", cap=100, buffer=20)(
        table([1, 1, 1, 0], [0] * 4, [80, 90, 100, 100])
    )
    close(shaped, vector(1, 0.5, 0, -1))


def test_kl_reward_by_hand() -> None:
    kl = torch.stack([vector(0.2, 4), vector(1, 2), vector(3, 0)], 1)
    for kind, expected in (("k1", (0.9, -2)), ("k2", (0.5, -1)), ("k3", (-0.5, 0))):
        close(
            build("shaping", "kl_reward", beta=0.5, kind=kind)(table([1, 0], [0, 0], kl=kl)),
            vector(*expected),
        )


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.0), ("k2", LOG2**2), ("k3", 0.5)])
def test_kl_in_the_reward_is_summed_over_tokens_by_hand(kind: str, expected: float) -> None:
    """old - ref = ln 2, -ln 2: k1 cancels; k2 = 2 ln^2 2 / 2; k3 = 1/2 - 1 + ln 2 + 2 - 1 - ln 2."""
    objective = Objective(
        section(shaping=[{"name": "kl_reward", "beta": 1.0, "kind": kind}], advantage="dr_grpo")
    )
    part = packed([3, 1], old=[LOG2, -LOG2, 9.0, 0.0], ref=[0.0] * 4, mask=[1.0, 1.0, 0.0, 1.0])
    plan = objective.plan(table([1, 1], [0, 0], [2, 1]))
    objective.finish(plan, [part])
    close(plan.advantages, vector(-expected / 2, expected / 2))


def test_reducers_by_hand() -> None:
    lengths, active = torch.tensor([2, 4, 10]), torch.tensor([True, True, False])
    expected = {"token_mean": ([1, 1, 1], 16, 6), "sequence_mean": ([0.5, 0.25, 0.1], 3, 2)}
    for name, (factors, every, some) in {**expected, "constant": ([1, 1, 1], 24, 16)}.items():
        params = {"length": 8} if name == "constant" else {}
        factor, denominator = build("reducer", name, **params)(lengths, active)
        close(factor, torch.tensor(factors, dtype=factor.dtype))
        assert denominator == every
        assert build("reducer", name, over="active", **params)(lengths, active).denominator == some


def test_reducers_survive_empty_steps() -> None:
    for name in ("token_mean", "sequence_mean", "constant"):
        assert build("reducer", name)(torch.tensor([0]), torch.tensor([False])).denominator >= 1


def test_effective_share_by_hand() -> None:
    """Weights 1 and 3: 16 / 10 of 2; equal weights, however large: 1."""
    assert effective_share(vector(0, math.log(3))) == pytest.approx(0.8)
    assert effective_share(vector(5000, 5000, 5000)) == pytest.approx(1)


def test_vcpo_scales_the_step_by_hand() -> None:
    samples = table([1, 0], [0, 0], log_weight=vector(0, math.log(3)))
    assert build("hook", "vcpo").lr_factor(samples, [0, 1], 2) == pytest.approx(math.sqrt(0.8))
    assert build("hook", "vcpo", shape="linear", rho0=0.9).lr_factor(samples, [0, 1], 2) == pytest.approx(
        0.8 / 0.9
    )
    assert build("hook", "vcpo", rho0=0.5).lr_factor(samples, [0, 1], 2) == 1


def test_vcpo_counts_every_sample_of_the_update_by_hand() -> None:
    """Two of eight samples have an advantage, and weight 1; the weights of the others spread. The authors take the
    effective size of all eight: sqrt(ESS / 8) = 0.535 (mit-han-lab/vcpo, staleness_utils.py)."""
    algo, gaps = section(hooks=["vcpo"]), [0.0, 0.0, 3.0, -3.0, 2.0, -2.0, 1.0, -1.0]
    objective = Objective(algo)
    plan = objective.plan(table([1, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2, 2]))
    part = packed([1] * len(plan.rows), old=[gaps[r] for r in plan.rows])
    part.rows = torch.tensor(plan.rows)
    objective.finish(plan, [part])
    weights = vector(*gaps).exp()
    expected = float(weights.sum() ** 2 / (weights**2).sum() / 8) ** 0.5
    assert expected == pytest.approx(0.535, abs=1e-3)
    assert objective.lr_factor(plan, plan.rows) == pytest.approx(expected)


def test_brorl_scales_the_step_by_all_samples_by_hand() -> None:
    """32 samples for a rate chosen for 8: 2. Half of them without an advantage: still 2. Two updates: 16 each."""
    assert build("hook", "brorl", samples=8).lr_factor(table([0] * 32, [0] * 32), range(4), 32) == 2
    rewards = [1, 0] * 8 + [1] * 16
    for minibatches in (1, 2):
        algo = section(hooks=[{"name": "brorl", "samples": 8}], minibatches=minibatches)
        objective = Objective(algo)
        plan = objective.plan(table(rewards, [0] * 16 + [1] * 16))
        assert len(plan.rows) == 16
        rows = plan.rows[: 16 // minibatches]
        assert objective.lr_factor(plan, rows) == pytest.approx(2 / math.sqrt(minibatches))


def test_brorl_leaves_a_rate_that_was_chosen_for_this_batch() -> None:
    objective = Objective(section(hooks=[{"name": "brorl", "samples": 8}]))
    for rewards in ([1, 0] * 4, [1, 0, *[1] * 6], [1] * 8):
        plan = objective.plan(table(rewards, [0, 0, 1, 1, 2, 2, 3, 3]))
        assert objective.lr_factor(plan, plan.rows) == 1
    again = objective.plan_deferred(table([1] * 2, [0, 1]), vector(1, -1))
    assert objective.lr_factor(again, again.rows) == 0.5  # an extra update on a quarter of the samples


def test_ewma_by_hand() -> None:
    """beta 2/3: (2/3 * 1 + 4) / (2/3 + 1) = 2.8, the initial weights being the first; a low active share starts
    again."""
    hook, weights = build("hook", "ewma", window=4), torch.tensor([1.0])
    hook.start([("w", weights)])
    assert hook.average()["w"].item() == 1
    weights.fill_(4.0)
    hook.after_version([("w", weights)], 1.0)
    hook.start([("w", weights)])  # of the next step: the run has begun
    assert hook.average()["w"].item() == pytest.approx(2.8)
    hook.after_version([("w", weights.fill_(7.0))], 0.5)
    assert hook.average()["w"].item() == 7


def test_mismatch_by_hand() -> None:
    """d = 0 on the current version, ln 2 and -ln 2 on older ones; a masked token does not count."""
    batch = packed([4], versions=[7.0, 6.0, 4.0, 7.0], mask=[1.0, 1.0, 1.0, 0.0])
    batch.version = 7
    clipped, rejected = (torch.tensor(f) > 0 for f in ([0, 1, 0, 1], [0, 0, 1, 1]))
    metrics = mismatch_metrics(mismatch_sums(vector(0, LOG2, -LOG2, 9), batch, clipped, rejected))
    assert metrics["drift_mean"] == pytest.approx(2 * LOG2 / 3)
    assert metrics["drift_mean_age0"] == 0
    assert metrics["drift_k3_age1"] == pytest.approx(1 - LOG2)
    assert metrics["drift_ess"] == pytest.approx(3.5**2 / 5.25 / 3)
    assert "drift_mean_age4" not in metrics
    assert metrics["clip_share"] == metrics["rejected_share"] == pytest.approx(1 / 3)
    assert [metrics[f"clip_share_age{age}"] for age in (0, 1, 2)] == [0, 1, 0]
    assert [metrics[f"rejected_share_age{age}"] for age in (0, 1, 2)] == [0, 0, 1]


def stepped(objective: Objective, batch: Batch, logp: torch.Tensor) -> dict[str, float]:
    """Metrics of one update on one sample of advantage 1."""
    batch.advantages, batch.weight = torch.ones_like(logp), torch.ones_like(logp)
    return loss_metrics(objective(logp, batch)[1], objective.requirements.needs)


def test_a_token_that_is_rejected_is_not_clipped_as_well() -> None:
    """Ratios 2, 2, 1, 1 to the anchor, which is at 8, 1, 8, 1 times mu: one clipped, two rejected, one active."""
    objective = Objective(section(anchor="old", corrections=["icepop"], loss=["clip", "dual_clip"]))
    batch = packed([4], old=[3 * LOG2, 0.0, 3 * LOG2, 0.0], versions=[0.0, 0.0, 1.0, 1.0])
    batch.version = 1
    metrics = stepped(objective, batch, vector(4 * LOG2, LOG2, 3 * LOG2, 0))
    assert (metrics["clip_share"], metrics["rejected_share"], metrics["active_share"]) == (0.25, 0.5, 0.25)
    assert (metrics["clip_share_age1"], metrics["rejected_share_age1"]) == (0.5, 0.5)
    assert (metrics["clip_share_age0"], metrics["rejected_share_age0"]) == (0, 0.5)


def test_the_average_is_not_reset_when_clipped_and_rejected_tokens_coincide() -> None:
    """One of ten tokens is both: 0.9 are active, which is enough; counted twice it would start again."""
    objective = Objective(section(anchor="old", corrections=["icepop"], hooks=["ewma"]))
    batch = packed([10], old=[3 * LOG2] + [0.0] * 9)
    weights = torch.tensor([1.0])
    for value in (1.0, 4.0):
        metrics = stepped(objective, batch, vector(4 * LOG2, *[0.0] * 9))
        weights.fill_(value)
        objective.after_version(lambda: [("w", weights)], metrics["active_share"])
    assert metrics["active_share"] == pytest.approx(0.9)
    assert objective.average()["w"].item() == pytest.approx(2.8)


def test_the_average_is_not_reset_by_cispo_weight_bounds() -> None:
    """Every weight is bounded at 1.28 and every token has its gradient: all are active."""
    objective = Objective(section(loss=["cispo"], anchor="ewma", hooks=["ewma"]))
    batch = packed([2], ewma=[0.0, 0.0])
    weights = torch.tensor([1.0])
    for value in (1.0, 4.0):
        metrics = stepped(objective, batch, vector(LOG2, LOG2))
        weights.fill_(value)
        objective.after_version(lambda: [("w", weights)], metrics["active_share"])
    assert (metrics["clip_share"], metrics["active_share"]) == (0, 1)
    assert objective.average()["w"].item() != 4.0


def test_policy_kl_is_that_of_the_version_before_by_hand() -> None:
    """w = 2 on its token: 1 - ln 2, whatever older tokens say; without one, what moved within the step."""
    objective = Objective(section())
    batch = packed([3], versions=[7.0, 6.0, 4.0])
    batch.version = 7
    assert stepped(objective, batch, vector(LOG2, LOG2, 9))["policy_kl"] == pytest.approx(1 - LOG2)
    fresh = packed([2], versions=[7.0, 7.0])
    fresh.version = 7
    assert stepped(objective, fresh, vector(0, -LOG2))["policy_kl"] == pytest.approx((LOG2 - 0.5) / 2)
