"""One strict xfail for each finding of the audit of numbers that is still there. tests/findings.md lists them.

A test that passes has lost its fault: remove its mark. Expected numbers are transcribed here in float64 from the
papers' or the authors' formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.algo import build
from rlsys.algo.advantages import Advantage
from rlsys.algo.batch import Samples
from rlsys.algo.losses import View
from rlsys.algo.objective import Objective
from rlsys.algo.preflight import check, notes
from rlsys.algo.reduction import single_rank
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.core.types import Status
from rlsys.segments.records import SegmentReader
from rlsys.tenants.losses import LOSSES, token_losses
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, pack
from rlsys.trainer.step import train_step
from tests.helpers.algo_world import DOUBLE, Outcome, World, packed, run, section, table
from tests.helpers.signal_cases import recorded, single_rewards

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


def recipe(name: str) -> Any:
    return load_config(CONFIGS / "algorithms" / f"{name}.yaml").algo


def whole(rows: list[int]) -> list[list[int]]:
    return [rows]


def largest_change(one: Outcome, other: Outcome) -> float:
    """Of a gradient, as a share of the largest gradient; a row that is missing has none."""
    zeros = torch.zeros(4, 1, dtype=DOUBLE)
    rows = {*one.gradients, *other.gradients}
    changes = [(one.gradients.get(r, zeros) - other.gradients.get(r, zeros)).abs().max() for r in rows]
    return float(max(changes) / max(g.abs().max() for g in one.gradients.values()))


def accepted(*overrides: str) -> str:
    """Empty, or the line with which preflight refuses."""
    try:
        check(load_config(QUICKSTART, overrides))
    except UserError as refusal:
        return str(refusal)
    return ""


# -- N1: a step without a trained response ------------------------------------------------------------------


class ScriptedTrainer:
    """The calls of `train_step` on one rank, without a model: made-up scores, and a record of the updates."""

    def __init__(self, config: Any, folder: Path) -> None:
        self.config, self.segments = config, SegmentReader(folder)
        self.replayed_layers, self.critic, self.teacher = (), None, None
        self.first_weights: Mapping[str, Tensor] = {}
        self.updates: list[float | None] = []
        self.passes = SimpleNamespace(
            pack=lambda unread: pack(unread, 4096),
            score=self._score,
            logprobs=lambda batch: [s.logp for s in self._score(batch)],
            sum_over_dp=single_rank,
        )

    @staticmethod
    def _score(batch: list[MicroBatch]) -> list[Scores]:
        """What a forward pass could say: the engine's log-probs, a bit moved."""
        return [
            Scores(m.mu - 0.1, m.mu.abs(), torch.full_like(m.mu, 0.3), torch.full_like(m.mu, 0.5))
            for m in batch
        ]

    def named_parameters(self) -> list[Any]:
        return []

    def with_weights(self, _: Mapping[str, Tensor]) -> Any:
        return SegmentReader(Path())  # any context manager

    without_replay = partial(SegmentReader, Path())

    def update(self, batch: list[MicroBatch], loss: Any, lr: float, denominator: float | None = None) -> Any:
        self.updates.append(denominator)
        sums: dict[str, Tensor] = {}
        for micro, scores in zip(batch, self._score(batch), strict=True):
            for name, value in loss(scores, micro)[1].items():
                sums[name] = value.double() + sums.get(name, 0)
        return SimpleNamespace(
            sums=sums,
            loss=0.0,
            grad_norm=0.0,
            skipped=False,
            without_gradient=False,
            padding_share=0.0,
            shared_share=0.0,
            routing={},
            prediction={},
        )


LATE = {
    "gae": ["algo.advantage=gae", "algo.loss=[clip, value]"],
    "optimal_token_baseline": ["algo.advantage=optimal_token_baseline"],
    "kl_reward": ["algo.shaping=[{name: kl_reward, beta: 0.001}]"],
    "vcpo_baseline": ["algo.advantage=vcpo", "algo.anchor=old", "algo.reducer=sequence_mean"],
}
"""Advantages that are known after the scoring passes only."""


def a_step(tmp_path: Path, cut_off: bool, *overrides: str) -> tuple[ScriptedTrainer, dict[str, object]]:
    config = load_config(QUICKSTART, overrides)
    check(config)
    batch = single_rewards(recorded())
    if cut_off:
        batch = replace(
            batch,
            groups=[
                replace(g, samples=[replace(s, status=Status.TRUNCATED) for s in g.samples])
                for g in batch.groups
            ],
        )
    trainer = ScriptedTrainer(config, tmp_path)
    return trainer, train_step(trainer, Objective(config.algo), batch)  # type: ignore[arg-type]


FILTER = "algo.selectors=[{{name: overlong_filter, denominator: {}}}]"


@pytest.mark.parametrize("overrides", LATE.values(), ids=LATE)
def test_numbers_n1_control_a_step_with_whole_responses_has_one_update(
    tmp_path: Path, overrides: list[str]
) -> None:
    trainer, _ = a_step(tmp_path, False, *overrides, FILTER.format("kept"))
    assert [d is not None and d > 0 for d in trainer.updates] == [True]


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_numbers_n1_control_early_advantages_skip_a_step_that_was_all_cut_off(
    tmp_path: Path, denominator: str
) -> None:
    trainer, metrics = a_step(tmp_path, True, FILTER.format(denominator))
    assert (trainer.updates, metrics["effective_groups"]) == ([], 0)


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("overrides", LATE.values(), ids=LATE)
def test_numbers_n1_a_step_of_truncated_responses_makes_no_update(
    tmp_path: Path, overrides: list[str], denominator: str
) -> None:
    trainer, metrics = a_step(tmp_path, True, *overrides, FILTER.format(denominator))
    assert trainer.updates == [], f"update divided by {trainer.updates}, though no response is trained"
    assert metrics["effective_groups"] == 0


# -- N2: GPG ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards",
    [
        [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]],
        [[1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1], [-1, 1, -1, -1]],
        [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]],
    ],
    ids=["one success", "nearly learned", "plus and minus one", "all mixed"],
)
def test_numbers_n2_the_recipe_gpg_scales_as_its_authors_do(rewards: list[list[float]]) -> None:
    """AMAP-ML/GPG: alpha = B / (B - M), M the groups of equal rewards among B; A = alpha (R - mean)."""
    mixed = sum(len(set(group)) > 1 for group in rewards)
    expected = [len(rewards) / mixed * (r - sum(g) / len(g)) for g in rewards for r in g]
    step = table([r for g in rewards for r in g], [i for i, g in enumerate(rewards) for _ in g])
    advantages = Objective(recipe("gpg")).plan(step).advantages
    assert advantages is not None
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


# -- N3: a term reads a property off the whole list -----------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 4])
def test_numbers_n3_a_term_of_weight_0_changes_nothing(minibatches: int) -> None:
    world, algo = World(seed=1), {"anchor": "old", "corrections": ["tis"], "minibatches": minibatches}
    baseline = run(world, section(loss=["reinforce"], **algo), whole)
    zero_kimi = run(world, section(loss=["reinforce", {"name": "kimi", "tau": 0.0}], **algo), whole)
    assert zero_kimi.loss == pytest.approx(baseline.loss, abs=1e-9)
    assert largest_change(baseline, zero_kimi) == pytest.approx(0, abs=1e-9)


def test_numbers_n3_control_a_kl_of_weight_0_changes_nothing() -> None:
    world, algo = World(seed=1), {"anchor": "old", "corrections": ["tis"]}
    baseline = run(world, section(loss=["reinforce"], **algo), whole)
    zero_kl = run(world, section(loss=["reinforce", {"name": "kl", "beta": 0.0}], **algo), whole)
    assert largest_change(baseline, zero_kl) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("loss", ["[reinforce, kimi]", "[dro]", "[topr]"])
def test_numbers_n3_a_correction_of_a_term_without_ratio_is_accepted_at_mu(loss: str) -> None:
    refusal = accepted("algo.anchor=mu", "algo.corrections=[tis]", f"algo.loss={loss}")
    assert refusal == ""


# -- N4: statistics of an update -----------------------------------------------------------------------------

POOLS: dict[str, dict[str, Any]] = {
    "bapo": {"loss": ["bapo"]},
    "m2po mask": {"loss": [{"name": "m2po", "form": "mask"}]},
    "tis normalise": {"anchor": "old", "corrections": [{"name": "tis", "normalise": True}]},
    "icepop normalise": {"anchor": "old", "corrections": [{"name": "icepop", "normalise": True}]},
}
"""What takes a statistic over the tokens of an update."""


def cut_world() -> World:
    return World(seed=5, scale=0.5)


def test_numbers_n4_control_clip_has_no_statistic_to_move() -> None:
    algo = {"selectors": ["overlong_filter"]}
    early = run(cut_world(), section(**algo), whole)
    late = run(cut_world(), section(**algo, shaping=[{"name": "kl_reward", "beta": 0.0}]), whole)
    assert largest_change(early, late) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("algo", POOLS.values(), ids=POOLS)
def test_numbers_n4_late_advantages_leave_the_statistics_of_an_update(algo: dict[str, Any]) -> None:
    """A KL inside the reward of weight 0 moves no number: dropped responses are packed, and train nothing."""
    algo = {**algo, "selectors": ["overlong_filter"]}
    early = run(cut_world(), section(**algo), whole)
    late = run(cut_world(), section(**algo, shaping=[{"name": "kl_reward", "beta": 0.0}]), whole)
    assert largest_change(early, late) == pytest.approx(0, abs=1e-6)


def test_numbers_n4_a_kl_weight_of_nearly_0_leaves_the_whitening_of_reinforce_pp() -> None:
    def trained(beta: float) -> Outcome:
        advantage = {"name": "reinforce_pp", "beta": beta}
        return run(cut_world(), section(advantage=advantage, selectors=["overlong_filter"]), whole)

    assert largest_change(trained(0.0), trained(1e-12)) == pytest.approx(0, abs=1e-6)


def test_numbers_n4_gae_whitens_over_the_trained_tokens() -> None:
    """Mean 0 and standard deviation 1 (with n - 1) over the tokens that are trained."""
    world = cut_world()
    objective = Objective(section(advantage="gae", loss=["clip", "value"], selectors=["overlong_filter"]))
    plan = objective.plan(world.samples)
    part = world.part(plan.rows)
    part.rows = torch.tensor(plan.rows)
    objective.finish(plan, [part])
    trained = part.signal("advantages")[part.keep & (part.signal("weight") != 0)]
    assert (float(trained.mean()), float(trained.std())) == pytest.approx((0, 1), abs=1e-4)


TOKEN_POOLS = {name: algo for name, algo in POOLS.items() if name != "icepop normalise"}


@pytest.mark.parametrize("algo", TOKEN_POOLS.values(), ids=TOKEN_POOLS)
def test_numbers_n4_dropped_tokens_do_not_move_the_gradient_of_trained_ones(algo: dict[str, Any]) -> None:
    """top_entropy takes the tokens of largest entropy; the engine's log-probs of all others move by 0.7."""
    algo = {**algo, "selectors": [{"name": "top_entropy", "share": 0.3}]}
    world, moved = World(seed=5, scale=0.2), World(seed=5, scale=0.2)
    entropies = torch.cat([s["entropy"][s["mask"] > 0] for s in world.sequences])
    edge = torch.quantile(entropies, 0.6)  # dropped for certain
    for sequence in moved.sequences:
        dropped = (sequence["entropy"] < edge) & (sequence["mask"] > 0)
        sequence["mu"] = torch.where(dropped, sequence["mu"] - 0.7, sequence["mu"])
    reference_run, perturbed_run = run(world, section(**algo), whole), run(moved, section(**algo), whole)
    assert largest_change(reference_run, perturbed_run) == pytest.approx(0, abs=1e-6)


# -- N5: ties ------------------------------------------------------------------------------------------------


def d3s_keeps(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each group the advantages that D3S trains in its first step."""
    groups = [i for i, g in enumerate(rewards) for _ in g]
    step = table([r for g in rewards for r in g], groups, [5] * len(groups))
    plan = Objective(section(selectors=["d3s"])).plan(step)
    assert plan.advantages is not None
    advantages: list[list[float]] = [[] for _ in rewards]
    for row in plan.rows:
        advantages[groups[row]].append(float(plan.advantages[row]))
    return advantages


def test_numbers_n5_d3s_balances_successes_and_failures_across_early_and_late_groups() -> None:
    """16 groups with 4 successes of 8: a fair draw of half leaves both kinds in nearly every group."""
    advantages = d3s_keeps([[1, 0] * 4] * 16)
    early, late = (sum(sum(g) for g in half) for half in (advantages[:8], advantages[8:]))
    assert max(abs(early), abs(late)) <= 12, (
        f"sums of advantages: {early} of early groups, {late} of late ones"
    )
    one_sided = sum(not (any(a > 0 for a in g) and any(a < 0 for a in g)) for g in advantages)
    assert one_sided <= 6, f"{one_sided} of 16 groups are trained on one kind of answer only"


# -- N6: samples of several sequences --------------------------------------------------------------------------


def token_gradients(sequences: int, loss: str = "clip", advantage: Any = None, **algo: Any) -> Tensor:
    """Of the 8 tokens of a sample that is cut into equal sequences; a second sample of its group is one sequence."""
    lengths = [8 // sequences] * sequences + [8]
    n = sum(lengths)
    g = torch.Generator().manual_seed(0)
    mu = -torch.rand(8, generator=g, dtype=DOUBLE).repeat(2) - 0.1
    part = packed(
        lengths, mu.tolist(), old=(mu + 0.02).tolist(), current=(mu + 0.02).tolist(), ref=(mu - 0.05).tolist(),
        sum_pi_squared=[0.4] * n,
    )  # fmt: skip
    part.rows = torch.tensor([0] * sequences + [1])
    samples = table([1.0, 0.0], [0, 0], [8, 8])
    objective = Objective(section(loss=[loss], advantage=advantage or "grpo", **algo))
    plan = objective.plan(samples)
    assert plan.rows == [0, 1]
    objective.finish(plan, [part])
    if objective.requirements.prepares:
        objective.prepare([part])
    drift = torch.linspace(0.2, -0.3, 8, dtype=DOUBLE).repeat(2)
    leaf = (part.mu + drift).requires_grad_()
    total, _ = objective(leaf, part)
    (total / plan.denominator).backward()
    assert leaf.grad is not None
    return leaf.grad[:8]


PER_SEQUENCE: dict[str, dict[str, Any]] = {
    "luspo": {"loss": "luspo", "reducer": "sequence_mean"},
    "optimal_token_baseline": {"advantage": "optimal_token_baseline"},
    "reinforce_pp with KL": {"advantage": {"name": "reinforce_pp", "beta": 0.5}},
    "minpro": {"corrections": ["minpro"], "anchor": "mu"},
}


@pytest.mark.parametrize(
    "algo",
    [
        {},
        {"reducer": "sequence_mean"},
        {"advantage": "reinforce_pp"},
        {"advantage": "rloo"},
    ],
    ids=["clip", "sequence_mean", "reinforce_pp", "rloo"],
)
def test_numbers_n6_control_a_cut_into_sequences_changes_no_gradient(algo: dict[str, Any]) -> None:
    reference = token_gradients(1, **algo)
    for sequences in (2, 4):
        torch.testing.assert_close(token_gradients(sequences, **algo), reference, atol=1e-9, rtol=0)


@pytest.mark.parametrize("algo", PER_SEQUENCE.values(), ids=PER_SEQUENCE)
def test_numbers_n6_a_sample_cut_into_sequences_has_the_same_gradient(algo: dict[str, Any]) -> None:
    """docs/agents.md: the same tokens before each token give the same gradient."""
    reference = token_gradients(1, **algo)
    for sequences in (2, 4):
        torch.testing.assert_close(token_gradients(sequences, **algo), reference, atol=1e-9, rtol=0)


# -- N7: what a mean is over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_numbers_n7_the_denominator_of_two_selectors_counts_kept_tokens(seed: int) -> None:
    """Both take the mean over what they keep; without a selection of tokens that is each kept token once."""
    d3s = {"name": "d3s", "denominator": "kept", "tokens_start": 1.0}
    world = World(seed=seed, graded=True)
    plan = Objective(section(selectors=[{"name": "overlong_filter", "denominator": "kept"}, d3s])).plan(
        world.samples
    )
    kept_tokens = float(world.samples.lengths[plan.weight != 0].sum())
    assert plan.denominator == pytest.approx(kept_tokens, rel=1e-6)


def test_numbers_n7_d3s_keeps_its_share_of_the_remaining_samples() -> None:
    world = World(seed=1, graded=True)
    plan = Objective(section(selectors=["ttrl", {"name": "d3s", "samples_start": 0.5}])).plan(
        replace(world.samples, step=0)
    )
    eligible_count = int(plan.eligible.sum())
    assert len(plan.rows) <= math.ceil(eligible_count / 2), (
        f"{len(plan.rows)} of {eligible_count} kept; expected half"
    )


# -- N8: KL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k2"])
def test_numbers_n8_gradient_ratio_is_refused_or_right_for_samples_of_any_policy(kind: str) -> None:
    """The exact expectation over a categorical policy's samples, against the gradient of KL(pi || ref)."""
    assert ratio_error(kind) < 1e-9


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_numbers_n8_control_gradient_ratio_is_right_of_k1_and_k3(kind: str) -> None:
    assert ratio_error(kind) < 1e-9


def ratio_error(kind: str) -> float:
    """0 where it is refused."""
    try:
        term = build("loss", "kl", beta=1.0, kind=kind, gradient="ratio", cap=None)
    except UserError:
        return 0.0
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=g, dtype=DOUBLE)
    ref, sampler = (torch.randn(7, generator=g, dtype=DOUBLE).log_softmax(0) for _ in range(2))
    exact = logits.clone().requires_grad_()
    logp = exact.log_softmax(0)
    (logp.exp() * (logp - ref)).sum().backward()
    leaf = logits.clone().requires_grad_()
    logp = leaf.log_softmax(0)
    part = packed([7], sampler.tolist(), ref=ref.tolist(), advantages=[0.0] * 7)
    loss, _ = term(View(part, logp, sampler), None)
    (sampler.exp() * loss).sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    return float((leaf.grad - exact.grad).abs().max())


def told(*overrides: str) -> list[str]:
    """The refusal, or the notes, of the quickstart with two updates a step and these settings."""
    try:
        config = load_config(QUICKSTART, ["algo.minibatches=2", *overrides])
        check(config)
    except UserError as refusal:
        return [str(refusal)]
    return notes(config)


def test_numbers_control_the_quickstart_has_no_note() -> None:
    assert told() == []


@pytest.mark.parametrize("term", ["kl", "adaptive_kl"])
def test_numbers_n8_k1_without_a_ratio_is_refused_or_noted(term: str) -> None:
    assert told(f"algo.loss=[clip, {{name: {term}, kind: k1}}]"), "accepted without a word"


# -- N9: Tinker ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantages", [[0.0, 0.0, 0.0], [1.0, 0.0, -1.0]])
def test_numbers_n9_dro_of_the_tinker_protocol_holds_positions_of_advantage_0(
    advantages: list[float],
) -> None:
    """tinker-docs, losses/dro: -sum over positions of logp A - beta / 2 (logp - q)^2."""
    logp, q = (torch.tensor(v, dtype=DOUBLE) for v in ([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.1]))
    a, beta = torch.tensor(advantages, dtype=DOUBLE), 0.5
    loss = token_losses(LOSSES["dro"], logp, {"logprobs": q, "advantages": a}, {"beta": beta}).sum()
    expected = -(logp * a - beta / 2 * (logp - q) ** 2).sum()
    assert float(loss) == pytest.approx(float(expected), abs=1e-12)


# -- N10: recipes ----------------------------------------------------------------------------------------------


def test_numbers_n10_the_recipe_dppo_has_prime_rls_gradient_or_names_its_cap() -> None:
    """A token that rises from 0.001 to 0.1, inside the trust region of 0.2: gradient -ratio = -100."""
    if "cap" in (CONFIGS / "algorithms/dppo.yaml").read_text():
        return
    term = Objective(recipe("dppo")).losses[0]
    logp = torch.tensor([math.log(0.1)], dtype=DOUBLE, requires_grad=True)
    part = packed([1], [math.log(0.001)], advantages=[1.0])
    loss, _ = term(View(part, logp, part.mu), None)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert float(gradient) == pytest.approx(-100.0, rel=1e-6)


def test_numbers_n10_vapo_lambda_spans_more_than_one_token() -> None:
    """lambda = 1 - 1 / (alpha l), at least 0; an answer of the shipped task has some 20 tokens."""
    advantage: Any = Objective(recipe("vapo")).advantage
    assert max(0.0, 1 - 1 / (advantage.alpha * 20)) > 0.5


def test_numbers_n10_branch_grpo_trains_a_shared_prefix_once_or_documents_it() -> None:
    """The authors (BranchGRPO, collect_all_transitions) train each edge of the tree once."""
    advantage = build("advantage", "branch_grpo")
    if "once" in (type(advantage).__doc__ or ""):
        return
    samples = replace(
        table([1.0, 1.0, 0.0, 0.0], [0] * 4, [6] * 4),
        index_in_group=torch.arange(4), stem=torch.tensor([-1, 0, 0, -1]), fork_at=torch.tensor([0, 4, 4, 0]),
    )  # fmt: skip
    objective = Objective(section(advantage="branch_grpo"))
    plan = objective.plan(samples)
    part = packed([6] * 4, [-1.0] * 24)
    objective.finish(plan, [part])
    leaf = part.mu.clone().requires_grad_()
    total, _ = objective(leaf, part)
    total.backward()
    assert leaf.grad is not None
    gradient = leaf.grad.view(4, 6)
    assert abs(float(gradient[:3, 0].sum())) == pytest.approx(abs(float(gradient[3, 0])), rel=1e-6)


# -- N11, N12: what preflight says --------------------------------------------------------------------------------

OLD = "algo.anchor=old"
SENSELESS = {
    "mc_grpo over active": [
        "rollout.group_size=4", "algo.planners=[mc_grpo]", "algo.advantage=mc_grpo",
        "algo.reducer={name: token_mean, over: active}",
    ],
    "vespo with tis": ["algo.loss=[vespo]", OLD, "algo.corrections=[tis]"],
    "decoupled_ppo with tis": [OLD, "algo.corrections=[tis, {name: decoupled_ppo, above: clamp, cap: 2.0}]"],
    "critic warms up for longer than the run": [
        "algo.advantage=gae", "algo.loss=[clip, value]", "algo.critic={warmup_steps: 10}", "trainer.steps=5",
    ],
    "icepop above 1": [OLD, "algo.corrections=[{name: icepop, low: 1.1, high: 2.0}]"],
    "icepop veto of 1": [OLD, "algo.corrections=[{name: icepop, veto: 1.0}]"],
    "rejection of exact tokens": [OLD, "algo.corrections=[{name: rejection, kind: k1, high: -0.1}]"],
    "tis above 1": [OLD, "algo.corrections=[{name: tis, floor: 1.5}]"],
    "dppo without room": ["algo.loss=[{name: dppo, low: 0, high: 0}]"],
    "d3s with gae": ["algo.advantage=gae", "algo.loss=[clip, value]", "algo.selectors=[d3s]"],
    "d3s with optimal_token_baseline": [
        "algo.advantage=optimal_token_baseline", "algo.selectors=[d3s]",
    ],
    "d3s with reinforce_pp": ["algo.advantage=reinforce_pp", "algo.selectors=[d3s]"],
    "distill with dapo": [
        "algo.loss=[distill]", "algo.planners=[dapo]", "algo.teacher={path: configs/models/quickstart-moe}",
    ],
    "distill with d3s": [
        "algo.loss=[distill]", "algo.selectors=[d3s]", "algo.teacher={path: configs/models/quickstart-moe}",
    ],
    "distill with rorecomp": [
        "algo.loss=[distill, kl]", "algo.selectors=[rorecomp]",
        "algo.teacher={path: configs/models/quickstart-moe}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("overrides", SENSELESS.values(), ids=SENSELESS)
def test_numbers_n11_a_combination_without_sense_is_refused_or_noted(overrides: list[str]) -> None:
    assert told(*overrides), "accepted without a word"


def test_numbers_n12_distillation_alone_accepts_one_response_per_prompt() -> None:
    teacher = "algo.teacher={path: configs/models/quickstart-moe}"
    for loss in ("distill", "distill, kl", "distill, entropy", "distill, positive_nll", "distill, kimi"):
        assert accepted(f"algo.loss=[{loss}]", "rollout.group_size=1", teacher) == "", loss
    assert "group_size >= 2" in accepted("algo.loss=[distill, clip]", "rollout.group_size=1", teacher)
    sampled = teacher.replace("}", ", top_k: 0}")
    assert accepted("algo.loss=[distill_pg]", "rollout.group_size=1", sampled) == ""


# -- N13, N14 ------------------------------------------------------------------------------------------------------


def test_numbers_n13_adaptive_entropy_is_steered_by_the_trained_tokens() -> None:
    """TRL: the mean entropy over its `effective_mask`. It is above the target over the trained tokens, so the second
    update has no bonus; over all tokens it is below."""
    world, target = World(seed=3, groups=6), 1.2
    entropy = torch.cat([s["entropy"][s["mask"] > 0] for s in world.sequences])
    trained = entropy[entropy >= torch.quantile(entropy, 0.8)]
    assert entropy.mean() < target < trained.mean()
    bonus = {"name": "adaptive_entropy", "coefficient": 0.1, "target": target}
    algo = section(loss=["clip", bonus], selectors=[{"name": "top_entropy", "share": 0.2}], minibatches=2)
    applied = run(world, algo, whole).metrics["entropy_coefficient"]
    assert applied < 0.08, f"the second of two updates had the bonus, too: mean coefficient {applied}"


@pytest.mark.parametrize("name", ["grpo", "gapo", "gdpo"])
def test_numbers_n14_the_last_bit_of_a_reward_is_no_advantage(name: str) -> None:
    """NVIDIA-NeMo/RL#4158."""
    rewards = torch.full((4,), 10.0)
    rewards[0] = torch.nextafter(rewards[0], torch.tensor(11.0))
    samples = Samples(
        rewards=rewards, group_ids=torch.zeros(4, dtype=torch.long), lengths=torch.full((4,), 3)
    )
    advantage: Advantage = build("advantage", name)
    assert float(advantage(samples).abs().max()) < 0.01


SEVERAL: dict[str, dict[str, Any]] = {
    **PER_SEQUENCE,
    "gspo": {"loss": "gspo", "reducer": "sequence_mean"},
    "gmpo": {"loss": "gmpo", "reducer": "sequence_mean"},
    "vespo": {"loss": "vespo"},
    "topr": {"loss": "topr"},
    "topr geometric": {"loss": {"name": "topr", "level": "geometric"}},
}


@pytest.mark.parametrize("algo", SEVERAL.values(), ids=SEVERAL)
def test_numbers_n6_the_sequences_of_a_sample_may_be_in_different_micro_batches(algo: dict[str, Any]) -> None:
    """As the trainer does it: `now` of all of them is scored, and `prepare` sees them together."""
    fields = dict(algo)
    loss, advantage = fields.pop("loss", "clip"), fields.pop("advantage", "grpo")
    objective = Objective(section(loss=[loss], advantage=advantage, **fields))
    g = torch.Generator().manual_seed(0)
    mu = -torch.rand(8, generator=g, dtype=DOUBLE) - 0.1
    current_logp = mu + torch.linspace(0.2, -0.3, 8, dtype=DOUBLE)
    samples = table([1.0, 0.0], [0, 0], [8, 8])

    def gradient(cuts: Sequence[Sequence[int]]) -> Tensor:
        """Of the first sample, whose sequences are those of all parts; the second is in the last part."""
        parts, tokens = [], 0
        for number, lengths in enumerate(cuts):
            n, last = sum(lengths), number == len(cuts) - 1
            token_slice = slice(tokens, tokens + n)
            values = {
                "old": mu[token_slice] + 0.02, "current": current_logp[token_slice], "ref": mu[token_slice] - 0.05,
                "sum_pi_squared": torch.full((n,), 0.4, dtype=DOUBLE),
            }  # fmt: skip
            second_values = {
                "old": mu + 0.02,
                "current": current_logp,
                "ref": mu - 0.05,
                "sum_pi_squared": values["old"][:0],
            }
            second_values["sum_pi_squared"] = torch.full((8,), 0.4, dtype=DOUBLE)
            joined = {k: torch.cat([v, second_values[k]]) if last else v for k, v in values.items()}
            part = packed(
                [*lengths, 8] if last else lengths,
                torch.cat([mu[token_slice], mu]).tolist() if last else mu[token_slice].tolist(),
                **{k: v.tolist() for k, v in joined.items()},
            )  # fmt: skip
            first_index = sum(len(c) for c in cuts[:number])
            part.sequence_index = [*range(first_index, first_index + len(lengths)), *([0] if last else [])]
            part.rows = torch.tensor([*[0] * len(lengths), *([1] if last else [])])
            parts.append(part)
            tokens += n
        plan = objective.plan(samples)
        objective.finish(plan, parts)
        objective.prepare(parts, split_samples=objective.requirements.whole_samples)
        gradients = []
        for part in parts:
            leaf = part.signal("current").clone().requires_grad_()
            (objective(leaf, part)[0] / plan.denominator).backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad[part.rows[part.ids] == 0])
        return torch.cat(gradients)

    reference = gradient([[8]])
    assert reference.any()
    for cuts in ([[4], [4]], [[2, 2], [4]], [[1], [3], [2, 2]]):
        torch.testing.assert_close(gradient(cuts), reference, atol=1e-9, rtol=0)
