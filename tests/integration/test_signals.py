"""Signals that plug-ins ask for, from the real trainer; what each recipe changes on one recorded step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.algo.objective import Objective
from rlsys.config import Config
from rlsys.core.arrays import log_probs
from rlsys.core.types import LogProbRequest
from rlsys.obs.token_records import read_floats, read_records
from rlsys.trainer.model.entropy import ROWS, logprob_and_entropy
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.step import (
    EarlyPasses,
    backward_early,
    prepare_batches,
    sample_table,
    score_parked,
    train_step,
)
from rlsys.trainer.token_log import MicroBatchRecord, write_token_log
from rlsys.trainer.trainer import Trainer
from tests.helpers import notes_cases as notes
from tests.helpers import signal_cases as cases

pytestmark = pytest.mark.integration


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[Trainer, Objective]]]:
    """A trainer on the quickstart's model and the objective of these overrides; closed by the next, or at the end."""
    open_ones: list[Trainer] = []

    def make(*overrides: str, lr: float = 1e-3) -> tuple[Trainer, Objective]:
        while open_ones:
            open_ones.pop().close()
        config: Config = cases.config_of(None, tmp_path / "run", *overrides, f"trainer.lr={lr}")
        objective = Objective(config.algo)
        open_ones.append(Trainer(config, objective.requirements.passes))
        return open_ones[0], objective

    yield make
    while open_ones:
        open_ones.pop().close()


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.named_parameters()}


def scored(trainer: Trainer, objective: Objective) -> list[MicroBatch]:
    train_batch = cases.single_rewards(cases.recorded())
    plan = objective.plan(
        sample_table(train_batch.groups, train_batch.train_step, objective.requirements.needs)
    )
    rows = list(range(sum(len(g.samples) for g in train_batch.groups)))
    return prepare_batches(trainer, objective, plan, train_batch, [rows])[0]


def test_entropy_and_its_gradient_equal_the_plain_formula(start: Callable[..., Any]) -> None:
    """More rows than are worked on at a time, and logits so far apart that probabilities underflow."""
    start()
    generator = torch.Generator().manual_seed(0)
    rows, columns = ROWS + 3, 11
    logits = torch.randn(rows, columns, generator=generator) * 4
    logits[0, 0] = 200.0
    target = torch.randint(0, columns, (rows,), generator=generator)
    logp_weights, entropy_weights = torch.randn(2, rows, generator=generator)

    plain = logits.clone().requires_grad_()
    log_probs = plain.log_softmax(-1)
    expected_logp = log_probs.gather(1, target[:, None])[:, 0]
    expected_entropy = -(log_probs.exp() * log_probs).sum(-1)
    (logp_weights * expected_logp + entropy_weights * expected_entropy).sum().backward()

    leaf = logits.clone().requires_grad_()
    logp, entropy = logprob_and_entropy(leaf * 1.0, target)
    (logp_weights * logp + entropy_weights * entropy).sum().backward()
    assert torch.allclose(logp, expected_logp, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert torch.allclose(leaf.grad, plain.grad, atol=1e-5)  # type: ignore[arg-type]


def test_the_token_log_records_the_logprobs_and_advantages_of_a_step(start: Callable[..., Any]) -> None:
    """Of the first groups by id: the log-probs of the weights that began the step, and the advantages."""
    trainer, objective = start("rollout.keep_groups=3")
    train_batch = cases.single_rewards(cases.recorded())
    kept_groups = sorted(train_batch.groups, key=lambda g: g.group_id)[:3]
    rows = [s for g in train_batch.groups for s in g.samples]
    batch = scored(trainer, objective)
    expected = {}
    for micro, logp in zip(batch, trainer.passes.logprobs(batch), strict=True):
        for row, end in zip(micro.rows.tolist(), micro.cu_seqlens[1:].tolist(), strict=True):
            expected[rows[row].sample_id] = logp[end - len(rows[row].response_ids) : end].tolist()
    noted: list[MicroBatchRecord] = []
    train_step(trainer, objective, train_batch, records=noted)
    write_token_log(trainer, train_batch, noted)
    records = read_records(trainer.config.run.dir, train_batch.train_step)
    assert set(records) == {s.sample_id for g in kept_groups for s in g.samples}
    for group, sample in ((g, s) for g in kept_groups for s in g.samples):
        record = records[sample.sample_id]
        assert np.frombuffer(record.ids, "<i4").tolist() == list(sample.response_ids)
        assert read_floats(record.mu) == pytest.approx(sample.mu)
        advantages = set(read_floats(record.advantages))
        rewards = [s.reward or 0.0 for s in group.samples]
        if len(set(rewards)) == 1:  # no gradient, so no pass
            assert not record.logp and not advantages
            continue
        assert read_floats(record.logp) == pytest.approx(expected[sample.sample_id], abs=1e-4)
        (advantage,) = advantages
        assert (advantage > 0) == ((sample.reward or 0.0) > sum(rewards) / len(rewards))


def test_the_reference_is_fixed_and_the_resident_weights_are_restored(start: Callable[..., Any]) -> None:
    trainer, objective = start("algo.loss=[clip,kl]")
    first = trainer.passes.logprobs(scored(trainer, objective))
    train_batch = cases.single_rewards(cases.recorded())
    assert train_step(trainer, objective, train_batch)["kl"] == 0
    assert train_step(trainer, objective, train_batch)["kl"] > 0
    weights_before = weights(trainer)
    batch = scored(trainer, objective)
    for micro, ref, current_logp in zip(batch, first, trainer.passes.logprobs(batch), strict=True):
        assert micro.ref is not None and torch.equal(micro.ref, ref)
        assert not torch.equal(current_logp, ref)
    assert all(torch.equal(weights_before[name], p) for name, p in trainer.named_parameters())


def test_exact_old_logprobs_are_those_of_the_sampling_weights(start: Callable[..., Any]) -> None:
    """The recording holds log-probs that its trainer stored at each interrupt; the engine agreed with them."""
    trainer, objective = start("algo.anchor=behaviour")
    train_batch = cases.recorded()
    stale, recomputed = 0, 0.0
    batch = scored(trainer, objective)
    for micro, old in zip(batch, trainer.passes.logprobs(batch), strict=True):
        anchor = objective.anchor_of(micro, old)
        current = micro.keep & (micro.versions == micro.version)
        older = micro.keep & ~current
        assert torch.equal(anchor[current], old[current])
        assert (anchor[older] - micro.mu[older]).abs().max() < 1e-4
        recomputed = max(recomputed, float((old[older] - micro.mu[older]).abs().max()))
        stale += int(older.sum())
    assert stale > 50
    assert recomputed > 0.1  # under other weights: recomputing later would not be exact
    sample = train_batch.groups[0].samples[0]
    (scores,) = score_parked([LogProbRequest(sample, 2)], trainer)
    (full_logp,) = trainer.passes.logprobs(
        [MicroBatch.of_tokens(torch.tensor([*sample.prompt_ids, *sample.response_ids]))]
    )
    assert scores.start == 2
    assert torch.allclose(torch.tensor(scores.logp), full_logp[len(sample.prompt_ids) + 2 :], atol=1e-5)
    assert score_parked([], trainer) == []


STATEFUL = (
    "algo.anchor=ewma", "algo.hooks=[ewma]", "algo.advantage=mssr", "algo.loss=[clip]",
    "algo.selectors=[{name: rorecomp, capacity: 8}]",
)  # fmt: skip
CRITIC = ("algo.advantage=gae", "algo.loss=[clip,value]")
FOLLOWED = (
    "algo.loss=[clip,{name: kl, beta: 0.1}]", "algo.anchor=ewma", "algo.minibatches=2",
    "algo.hooks=[ewma,{name: sync_ref, interval: 2, alpha: 0.3}]",
)  # fmt: skip
LONGER = (*STATEFUL, "algo.epochs=2", "algo.minibatches=2")


@pytest.mark.parametrize(
    "overrides",
    [STATEFUL, CRITIC, LONGER, FOLLOWED],
    ids=[
        "averages, records, replay",
        "value head",
        "the first in two epochs",
        "averages, a moving reference",
    ],
)
def test_an_objectives_state_is_restored_exactly(
    overrides: tuple[str, ...], start: Callable[..., Any]
) -> None:
    train_batch = cases.single_rewards(cases.recorded())
    trainer, objective = start(*overrides)
    for _ in range(2):
        train_step(trainer, objective, train_batch)
    trainer.save_checkpoint(2, objective)
    trainer.finish_checkpoint(wait=True)
    expected = train_step(trainer, objective, train_batch)
    again, fresh = start(*overrides)
    assert again.load_checkpoint(fresh) == 2
    assert train_step(again, fresh, train_batch) == expected


EPOCHS = ("algo.epochs=2", "algo.minibatches=2", "algo.anchor=old")


@pytest.mark.parametrize("corrections", ["[]", "[{name: tis, normalise: true}]"])
def test_epochs_repeat_the_minibatches_and_reuse_the_first_old_logprobs(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, corrections: str
) -> None:
    """Two epochs of two updates: a, b, a, b; `old` is that of the start of the step in all four, so the third moves
    away from it, whether or not somebody looks ahead."""
    train_batch = cases.single_rewards(cases.recorded())
    trainer, objective = start(*EPOCHS, f"algo.corrections={corrections}")
    updates: list[tuple[list[int], Tensor]] = []
    passes, update, forward = 0, trainer.update, trainer.passes.score

    def step(batch: list[MicroBatch], *args: Any, **kwargs: Any) -> Any:
        old = torch.cat([m.old for m in batch if m.old is not None])
        updates.append(([int(r) for m in batch for r in m.rows], old.clone()))
        return update(batch, *args, **kwargs)

    def count(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args)

    monkeypatch.setattr(trainer, "update", step)
    monkeypatch.setattr(trainer.passes, "score", count)
    two_epoch_metrics = train_step(trainer, objective, train_batch)
    (a, old_a), (b, old_b), (a2, old_a2), (b2, old_b2) = updates
    assert a == a2 and b == b2 and not set(a) & set(b)
    assert torch.equal(old_a, old_a2) and torch.equal(old_b, old_b2)
    assert passes == 2  # one for each mini-batch, before the first update
    trainer, objective = start(*EPOCHS[1:], f"algo.corrections={corrections}")
    one_epoch_metrics = train_step(trainer, objective, train_batch)
    assert (
        two_epoch_metrics["drift_k3_age0"] > 1.5 * one_epoch_metrics["drift_k3_age0"] > 0
    )  # further away from where it began


def test_current_logprobs_are_rescored_before_each_update_of_later_epochs(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, objective = start(*EPOCHS[:2], "algo.anchor=interpolated", "algo.loss=[m2po]")
    passes, forward = 0, trainer.passes.score

    def count(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args)

    monkeypatch.setattr(trainer.passes, "score", count)
    train_step(trainer, objective, cases.single_rewards(cases.recorded()))
    assert passes == 2 + 3


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every recipe's metrics on the recorded step; "" is the quickstart's, "NAME without" a recipe's as WITHOUT."""
    run = tmp_path_factory.mktemp("run")
    trainer = cases.trainer_of(run)
    metrics = {"": cases.outcome(trainer, None, run)}
    metrics |= {recipe: cases.outcome(trainer, recipe, run) for recipe in cases.RECIPES}
    metrics |= {f"{r} without": cases.outcome(trainer, r, run, *o) for r, o in WITHOUT.items()}
    trainer.close()
    return metrics


CLAIMS = {
    "branch_grpo": "loss", "echo": "loss",
    "adaptive_entropy": "loss", "adaptive_kl": "loss", "clip_cov": "clip_share", "dppo": "clip_share",
    "dppo_kl": "clip_share", "dro": "loss", "gmpo": "clip_share", "kimi": "loss", "kl_cov": "clip_share",
    "distill": "loss", "distill_pg": "loss",
    "luspo": "loss", "overlong_filter": "loss", "rejection": "rejected_share", "top_entropy": "grad_norm",
    "topr": "loss", "vespo": "loss",
    "bapo": "clip_share", "brorl": "lr", "cispo": "loss", "d3s": "grad_norm", "dars": "loss",
    "dars_b": "loss",
    "decoupled_ewma": "rejected_share", "decoupled_interpolated": "weight_mean", "decoupled_ppo": "rejected_share",
    "dr_grpo": "loss", "dual_clip": "clip_share", "entropy": "loss", "exact_old": "rejected_share", "gae": "loss",
    "gapo": "loss", "gdpo": "loss", "grpo": "loss", "grpo_roc": "clip_share", "gspo": "clip_share",
    "icepop": "rejected_share", "icepop_geometric": "rejected_share", "kl": "loss", "kl_reward": "loss",
    "kl_unbiased": "kl",
    "lens": "loss", "m2po": "loss", "m2po_mask": "clip_share", "mc_grpo": "loss", "minpro": "weight_mean",
    "mssr": "loss", "opsm": "rejected_share", "outcome_exploration": "loss", "puzzlecraft": "loss",
    "reinforce_pp": "loss", "reinforce_pp_baseline": "loss", "rloo": "loss", "rorecomp": "loss", "sapo": "loss",
    "gae_turn": "loss", "vapo": "loss", "gae_critic": "loss", "sync_ref": "kl", "optimal_token_baseline": "loss",
    "gpg": "loss", "grpo_passk": "loss", "lite_ppo": "loss", "maxrl": "loss", "opo": "loss",
    "dart": "grad_norm", "mapo": "loss", "ui_s1": "loss", "gae_turn_rewards": "loss",
    "tis": "weight_mean", "ttrl": "loss", "vcpo": "lr", "vcpo_baseline": "loss", "xrpo": "loss",
}  # fmt: skip
"""Recipe -> the metric of the step that it changes."""
CLIP = "algo.loss=[{name: clip, clip_high: 0.2}]"
WITHOUT = {
    "decoupled_ewma": ("algo.anchor=old",), "decoupled_interpolated": ("algo.anchor=old",),
    "exact_old": ("algo.anchor=old",),
    "adaptive_entropy": ("algo.loss=[clip]",), "adaptive_kl": ("algo.loss=[clip]",),
    "kl_unbiased": ("algo.loss=[clip,kl]",), "clip_cov": ("algo.loss=[clip]",),
    "gmpo": ("algo.loss=[clip]",), **dict.fromkeys(("distill", "distill_pg"), ("algo.loss=[clip]",)),
    "luspo": ("algo.loss=[gspo]",), **dict.fromkeys(("dro", "kimi", "topr"), ("algo.loss=[reinforce]",)),
    "brorl": ("algo.hooks=[]",), "entropy": ("algo.loss=[clip]",), "kl": ("algo.loss=[clip]",),
    "kl_reward": ("algo.shaping=[]",), "gae": (CLIP,), "lens": ("algo.selectors=[]", "algo.corrections=[]"),
    "grpo": ("algo.reducer=token_mean",),
    "dart": ("algo.selectors=[]",), "mapo": ("algo.advantage=grpo",), "ui_s1": ("algo.advantage=grpo",),
    "gae_turn_rewards": ("algo.advantage={name: gae, timestep: turn, rewards: response}",),
    "gae_turn": ("algo.advantage=gae",), "vapo": ("algo.advantage=gae",), "gae_critic": ("algo.critic=null",),
    "optimal_token_baseline": ("algo.advantage=grpo",), "sync_ref": ("algo.hooks=[]",),
    **dict.fromkeys(
        (
            "dr_grpo", "gdpo", "gpg", "lite_ppo", "maxrl", "mc_grpo", "opo", "puzzlecraft", "rloo", "vcpo_baseline",
            "grpo_passk",
        ),
        ("algo.advantage=grpo",),
    ),
}  # fmt: skip
"""Recipe -> itself without its plug-in, where it is more than the quickstart and that, or has a batch of its own."""
ROLLOUT_SIDE = {
    "aoi", "dapo", "dare", "explore", "fapo", "fapo_judge", "latr", "prompt_augmentation", "scope", "vade",
}  # fmt: skip
"""Recipes that change what is rolled out: tests/unit/planning/test_planning.py."""


def test_every_recipe_changes_its_claimed_metric(outcomes: dict[str, Any]) -> None:
    assert set(CLAIMS) | ROLLOUT_SIDE | {"early_backward"} == set(cases.RECIPES)
    plain = outcomes[""]
    unchanged = [
        (recipe, name, outcomes[recipe][name])
        for recipe, name in CLAIMS.items()
        if outcomes[recipe][name]
        == pytest.approx(outcomes.get(f"{recipe} without", plain)[name], rel=1e-6, abs=0)
    ]
    assert not unchanged
    for recipe in ROLLOUT_SIDE - {"dapo"}:  # dapo punishes long responses; these are short
        assert outcomes[recipe]["loss"] == plain["loss"]


@pytest.mark.parametrize(
    ("recipe", "weight", "figure"),
    [("kl", 0.001, "kl"), ("entropy", -0.001, "entropy"), ("gae", 0.5, "value_error")],
)
def test_a_further_term_adds_its_weighted_mean(
    outcomes: dict[str, Any], recipe: str, weight: float, figure: str
) -> None:
    """Its mean over the tokens is in the metrics, and the loss differs by just that."""
    metrics, without = outcomes[recipe], outcomes[f"{recipe} without"]
    assert metrics[figure] > 0.01
    assert metrics["loss"] - without["loss"] == pytest.approx(weight * metrics[figure], rel=5e-3)


def test_brorl_steps_by_the_root_of_its_batch(outcomes: dict[str, Any]) -> None:
    """48 samples, and a learning rate that was chosen for 128."""
    ratio = outcomes["brorl"]["lr"] / outcomes["brorl without"]["lr"]
    assert ratio == pytest.approx((48 / 128) ** 0.5)


def test_a_step_in_portions_is_the_step(outcomes: dict[str, Any]) -> None:
    """Early backward's recipe is Dr. GRPO's, half of its groups gone backward in two portions before the take."""
    early, full_step = outcomes["early_backward"], outcomes["dr_grpo"]
    assert early["early_share"] == 0.5
    assert set(early) == {*full_step, "early_share"}
    for name, value in full_step.items():
        if name not in ("padding_share", "shared_share"):  # portions are packed apart
            assert early[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_mismatch_excludes_the_effect_of_earlier_updates(start: Callable[..., Any]) -> None:
    """Trainer and engine are compared by the weights that sampled: in a step's first update, however far it moves."""
    metrics = []
    for lr in (1e-30, 1e-2):
        trainer, objective = start("algo.minibatches=2", "algo.epochs=2", lr=lr)
        metrics.append(train_step(trainer, objective, cases.single_rewards(cases.recorded())))
    still, moving = metrics
    assert moving["policy_kl"] > 100 * still["policy_kl"]
    assert sum(still["mismatch_hist"]) > 0
    assert moving["mismatch_hist"] == still["mismatch_hist"]


def test_every_step_that_went_backward_early_is_one_update(start: Callable[..., Any]) -> None:
    """All groups early, none left for the take: the update still comes; and the next step begins afresh."""
    train_batch = cases.single_rewards(cases.recorded())
    trainer, objective = start(lr=1e-3)
    train_step(trainer, objective, train_batch)
    expected = train_step(trainer, objective, train_batch)
    again, objective = start(lr=1e-3)
    for _ in range(2):
        early = EarlyPasses()
        backward_early(again, objective, train_batch, early)
        metrics = train_step(again, objective, train_batch, early)
    for name in ("loss", "grad_norm", "clip_share", "mismatch_mean"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name


REJECTED = "algo.corrections=[{name: rejection, kind: k1, level: token, low: -1.0, high: 1.0}]"


@pytest.mark.parametrize(
    ("early", "balance"),
    [(False, ()), (True, ()), (False, ("trainer.balance_loss=0.1",))],
    ids=["whole", "early backward", "load balance"],
)
def test_a_step_with_all_tokens_rejected_makes_no_update(
    start: Callable[..., Any], early: bool, balance: tuple[str, ...]
) -> None:
    """Neither momentum, nor weight decay, nor the gradient of the load balance moves the weights; a run goes on."""
    trainer, objective = start("algo.anchor=old", REJECTED, "trainer.weight_decay=0.1", *balance)
    train_batch = cases.single_rewards(cases.recorded())
    lost = replace(
        train_batch,
        groups=[
            replace(g, samples=[replace(s, mu=log_probs(m - 90 for m in s.mu)) for s in g.samples])
            for g in train_batch.groups
        ],
    )
    assert "updates_without_gradient" not in train_step(trainer, objective, train_batch)
    weights_before = weights(trainer)
    passes = EarlyPasses() if early else None
    if passes is not None:
        backward_early(trainer, objective, lost, passes)
    metrics = train_step(trainer, objective, lost, passes)
    assert metrics["updates_without_gradient"] == 1 and metrics["rejected_share"] == 1
    assert all(torch.equal(weights_before[name], p) for name, p in trainer.named_parameters())
    assert metrics["effective_groups"] > 0 and "lr" not in metrics
    trainer.save_checkpoint(2, objective)
    trainer.finish_checkpoint(wait=True)
    expected = train_step(trainer, objective, train_batch)
    assert expected["grad_norm"] > 0
    again, fresh = start("algo.anchor=old", REJECTED, "trainer.weight_decay=0.1", *balance)
    assert again.load_checkpoint(fresh) == 2
    assert train_step(again, fresh, train_batch) == expected


def test_the_token_log_is_the_same_in_every_layout(tmp_path: Path) -> None:
    """Sequences spread over ranks, cut in two, and log-probs that only the last pipeline stage has."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    layouts = ["dp=2", "cp=2", "pp=2"]
    subprocess.run(
        [*torchrun, "-m", notes.__name__, str(tmp_path), *layouts], check=True, env=env, timeout=400
    )
    notes.train_recorded(tmp_path / "alone")
    step = cases.recorded().train_step
    reference_records = read_records(tmp_path / "alone", step)
    assert len(reference_records) == notes.KEEP_GROUPS * 8 and any(
        reference.logp for reference in reference_records.values()
    )
    for layout in layouts:
        records = read_records(tmp_path / layout, step)
        assert records.keys() == reference_records.keys()
        for sample, reference in reference_records.items():
            assert (records[sample].ids, records[sample].mu) == (reference.ids, reference.mu)
            for name in ("logp", "advantages"):
                values, expected = (read_floats(getattr(t, name)) for t in (records[sample], reference))
                assert values == pytest.approx(expected, abs=1e-4), (layout, sample, name)


def test_every_recipe_is_the_same_in_every_layout(outcomes: dict[str, Any], tmp_path: Path) -> None:
    """Two processes: the sequences spread over both, and each sequence cut in two. They take torch's plain kernels,
    as on a CPU without vector instructions: no figure may hang on how this machine rounds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "ATEN_CPU_CAPABILITY": "default"}
    env = {**os.environ, **plain}
    layouts = ["dp=2", "cp=2"]
    subprocess.run([*torchrun, "-m", cases.__name__, str(tmp_path), *layouts], check=True, env=env)
    layout_metrics = json.loads((tmp_path / "seen.json").read_text())
    wrong = [
        (layout, recipe, name, value, metrics[name])
        for layout in layouts
        for recipe, metrics in layout_metrics[layout].items()
        for name, value in outcomes[recipe].items()
        if name not in ("padding_share", "shared_share")  # these depend on how sequences are cut
        and metrics[name] != pytest.approx(value, rel=2e-4, abs=2e-5)
    ]
    assert not wrong
