"""Which forward passes a train step takes, under which weights and by which experts, on the shipped model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.algo.objective import Objective
from rlsys.config.algo import AlgoSection
from rlsys.core.spans import RouteSpan
from rlsys.core.types import LogProbRequest, TrainBatch
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.step import (
    micro_loss,
    pack_rows,
    prepare_batches,
    sample_table,
    score_parked,
    shuffled,
    train_step,
)  # fmt: skip
from rlsys.trainer.trainer import Trainer
from tests.helpers import signal_cases as cases

pytestmark = pytest.mark.integration

REPLAY = ("trainer.replay=engine", "engine.return_routes=true")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[Trainer, Objective]]]:
    """A trainer on the shipped model and the objective of these overrides; closed by the next, or at the end."""
    open_ones: list[Trainer] = []

    def make(*overrides: str) -> tuple[Trainer, Objective]:
        while open_ones:
            open_ones.pop().close()
        config = cases.config_of(None, tmp_path / "run", *overrides)
        objective = Objective(config.algo)
        open_ones.append(Trainer(config, objective.requirements.passes))
        return open_ones[0], objective

    yield make
    while open_ones:
        open_ones.pop().close()


def recorded() -> TrainBatch:
    """One group of the recorded step, made stale."""
    batch = cases.single_rewards(cases.stale(cases.recorded()))
    mixed = [g for g in batch.groups if len({s.reward for s in g.samples}) > 1]
    return replace(batch, groups=mixed[:2])


def routed(taken: TrainBatch, trainer: Trainer) -> TrainBatch:
    """With random experts at all positions: none that the router would choose."""
    rng, hf = random.Random(1), trainer.hf
    experts, topk = hf.experts, hf.experts_per_token

    def of(length: int) -> RouteSpan:
        chosen = bytes(e for _ in range(length * hf.layers) for e in rng.sample(range(experts), topk))
        return RouteSpan(0, length, chosen)

    groups = [
        replace(
            g, samples=[replace(s, routes=[of(len([*s.prompt_ids, *s.response_ids]) - 1)]) for s in g.samples]
        )
        for g in taken.groups
    ]
    return replace(taken, groups=groups)


def by_row(batch: Sequence[MicroBatch], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Each row's response tokens."""
    out = {}
    for micro, value in zip(batch, values, strict=True):
        ends = micro.cu_seqlens.tolist()
        for k, row in enumerate(micro.rows.tolist()):
            trained = micro.keep[ends[k] : ends[k + 1]]
            out[row] = value[ends[k] : ends[k + 1]][trained]
    return out


def in_training(trainer: Trainer, batch: list[MicroBatch]) -> list[Tensor]:
    """Log-probs of the training forward pass, not of a scoring one."""
    logps: list[Tensor] = []

    def loss(scores: Any, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps.append(scores.logp.detach())
        return scores.logp.sum() * 0.0, {}

    trainer.update(batch, loss, 0.0, denominator=1.0)
    return logps


def gap(a: dict[int, Tensor], b: dict[int, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[r] - b[r]).abs().max()) for r in a)


def test_exact_old_is_scored_with_the_experts_that_training_replays(start: Callable[..., Any]) -> None:
    """With equal weights, what an interrupt scores is what the step will compute, to the last bits."""
    trainer, _ = start("algo.anchor=behaviour", *REPLAY)
    train_batch = routed(recorded(), trainer)
    samples = [s for g in train_batch.groups for s in g.samples]
    batch = pack_rows(train_batch, range(len(samples)), trainer)
    training, plain_logps = (
        by_row(b, in_training(trainer, b))
        for b in (batch, pack_rows(recorded(), range(len(samples)), trainer))
    )
    parked_scores = score_parked([LogProbRequest(s, 0) for s in samples], trainer)
    scored = {row: torch.tensor(scores.logp) for row, scores in enumerate(parked_scores)}
    print(
        f"|score_parked - training|: {gap(scored, training):.1e}; replayed or not: {gap(plain_logps, training):.2f}"
    )
    assert gap(scored, training) <= 1e-6
    assert gap(plain_logps, training) > 1


@pytest.mark.parametrize("replay", ["engine", "trainer"])
def test_the_reference_takes_its_own_experts(replay: str, start: Callable[..., Any]) -> None:
    """Not the policy's, which are given at random or of other weights; and it leaves those of the policy alone."""
    returned = "engine.return_routes=true"
    trainer, objective = start("algo.loss=[clip,kl]", f"trainer.replay={replay}", returned)
    train_batch, plain = routed(recorded(), trainer), recorded()
    rows = range(sum(len(g.samples) for g in train_batch.groups))
    reference = pack_rows(plain, rows, trainer)
    expected = by_row(reference, trainer.passes.logprobs(reference))
    with torch.no_grad():
        for parameter in dict(trainer.named_parameters()).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    plan = objective.plan(
        sample_table(train_batch.groups, train_batch.train_step, objective.requirements.needs)
    )
    (batch,) = prepare_batches(trainer, objective, plan, train_batch, [list(rows)])
    reference_logps = by_row(batch, [micro.signal("ref") for micro in batch])
    assert gap(reference_logps, expected) <= 1e-6
    current = by_row(batch, trainer.passes.logprobs(batch))
    if replay == "trainer":
        assert gap(by_row(batch, [micro.signal("old") for micro in batch]), current) == 0
    assert gap(current, expected) > 1e-2


class Scored(Objective):
    """Somebody always looks at `old` before the loss."""

    def __init__(self, section: AlgoSection) -> None:
        super().__init__(section)
        self.requirements = replace(
            self.requirements, scored=self.requirements.passes, looks_ahead=("the test",)
        )


def gradients(trainer: Trainer, objective: Objective, taken: TrainBatch) -> tuple[float, Tensor, int]:
    """Loss and gradient of a step's first update, and how many micro-batches were scored for all updates."""
    scored: list[int] = []
    plain, trainer.passes.score = trainer.passes.score, lambda b, *a: (scored.append(len(b)), plain(b, *a))[1]  # type: ignore
    plan = objective.plan(sample_table(taken.groups, taken.train_step, objective.requirements.needs))
    rows = shuffled(plan.rows, objective._minibatches, (0, taken.train_step))
    first = prepare_batches(trainer, objective, plan, taken, rows)[0]
    if objective.requirements.prepares:
        objective.prepare(first, trainer.passes.sum_over_dp)
    sums: list[Tensor] = []

    def loss(scores: Any, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        total, _ = micro_loss(objective, scores, micro, compare=True)
        sums.append(total.detach())
        return total / plan.denominator, {}

    trainer.passes.accumulate(first, loss)
    grads = torch.cat([p.main_grad.flatten().clone() for p in dict(trainer.named_parameters()).values()])  # type: ignore[attr-defined]
    trainer.update([], partial(micro_loss, objective, compare=True), 0.0, denominator=1.0)
    trainer.passes.score = plain  # type: ignore[method-assign]
    return float(sum(sums)) / plan.denominator, grads, sum(scored)


REUSING = {
    "old, one mini-batch": ("algo.anchor=old", "algo.corrections=[{name: tis, cap: 2.0}]"),
    "old, four": ("algo.anchor=old", "algo.corrections=[icepop]", "algo.minibatches=4"),
    "exact old": ("algo.anchor=behaviour", "algo.corrections=[icepop]"),
    "entropy": ("algo.loss=[clip,entropy]",),
    "replay": ("algo.anchor=old", "algo.corrections=[decoupled_ppo]", *REPLAY),
}


@pytest.mark.parametrize("name", REUSING)
def test_scoring_is_skipped_where_old_logprobs_equal_the_training_pass(
    name: str, start: Callable[..., Any]
) -> None:
    """Loss and gradient are those with the pass; what is scored is what later updates need."""
    trainer, objective = start(*REUSING[name])
    train_batch = routed(recorded(), trainer) if name == "replay" else recorded()
    loss, grad, passes = gradients(trainer, objective, train_batch)
    expected, expected_grad, expected_passes = gradients(trainer, Scored(trainer.config.algo), train_batch)
    size = float(expected_grad.abs().max())
    away = float((grad - expected_grad).abs().max())
    print(
        f"{name}: loss {loss} and {expected}, gradient {away:.1e} of {size:.1e}, scored {passes} of {expected_passes}"
    )
    assert loss == pytest.approx(expected, abs=1e-6)
    assert size > 1e-4
    assert away <= 1e-6 * max(1.0, size)
    assert passes == (expected_passes * 3 // 4 if name == "old, four" else 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo.loss=[bapo]", "algo.anchor=behaviour"),
        ("algo.anchor=old", "algo.corrections=[{name: tis, normalise: true}]"),
        ("algo.anchor=old", "algo.corrections=[tis]", "trainer.replay=trainer"),
        ("algo.advantage=vcpo", "algo.loss=[clip]"),
    ],
    ids=["bounds", "normaliser", "routes", "advantages"],
)
def test_scoring_is_kept_for_recipes_that_need_logprobs_in_advance(
    overrides: tuple[str, ...], start: Callable[..., Any]
) -> None:
    trainer, objective = start(*overrides)
    train_batch = recorded()
    plan = objective.plan(
        sample_table(train_batch.groups, train_batch.train_step, objective.requirements.needs)
    )
    (batch,) = prepare_batches(trainer, objective, plan, train_batch, [list(range(4))])
    assert all(micro.old is not None and not micro.old_is_current for micro in batch)


def test_averaged_weights_follow_versions(start: Callable[..., Any]) -> None:
    """A window of 2: beta 1/2. After the first step of four updates, (theta_0 / 2 + theta_1) / (3 / 2)."""
    trainer, objective = start(
        "algo.anchor=ewma", "algo.hooks=[{name: ewma, window: 2, reset_below: 0}]", "algo.minibatches=4",
        "trainer.lr=1e-2",
    )  # fmt: skip
    initial_weights = {name: p.detach().clone() for name, p in trainer.named_parameters()}
    train_step(trainer, objective, recorded())
    average = objective.average()
    assert average.keys() == initial_weights.keys()
    for name, parameter in trainer.named_parameters():
        torch.testing.assert_close(
            average[name], (initial_weights[name] / 2 + parameter.detach()) / 1.5, atol=1e-6, rtol=0
        )
    assert (
        max(float((p.detach() - initial_weights[n]).abs().max()) for n, p in trainer.named_parameters())
        > 1e-3
    )
