"""Trees and repairs in a real run, over kill -9; and what forked samples give the trainer."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlsys.algo.objective import Objective
from rlsys.core.forks import fork
from rlsys.core.spans import Fork, VersionSpan
from rlsys.core.types import Sample, SampleGroup, Segment, Status
from rlsys.ledger.reader import RunReader
from rlsys.obs.metrics import read_metrics
from rlsys.trainer.trainer import Trainer
from tests.helpers import signal_cases as cases
from tests.helpers.sessions import GROUPS, Session, check_agreement, check_ledger
from tests.integration.test_passes import gradients

pytestmark = pytest.mark.integration

STEPS = 5
TREES = (
    "rollout.generator=latr",
    "rollout.generator_params={second: 0.02, max_gap: 0.9}",
    "algo.advantage=branch_grpo",
    "algo.planners=[scope]",
    "data.process_judge=chain_sum",
    f"trainer.steps={STEPS}",
)


def test_a_run_of_trees_and_repairs_outlives_its_rollout_process(tmp_path: Path) -> None:
    """Trainer and engine agree on inherited, forced and repaired tokens, and no token is lost."""
    run = tmp_path / "run"
    session = Session(run, *TREES)
    try:
        session.wait_for_steps(1)
        session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
        session.wait_for_steps(2)
        session.find("rlsys.engine.server").send_signal(signal.SIGKILL)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    check_trees(run)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_trees_and_repairs_of_two_workers_outlive_worker_and_coordinator(tmp_path: Path) -> None:
    run = tmp_path / "run"
    session = Session(run, *TREES, "engine.count=2", "rollout.workers=2")
    try:
        session.wait_for_steps(1)
        session.find("rlsys.worker.worker", "--number", "1").kill()
        session.wait_for_steps(3)
        session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    check_trees(run)


def check_trees(run: Path) -> None:
    figures = check_ledger(run)
    assert figures["trained"] == STEPS * GROUPS and figures["given"] > 0
    check_agreement(run)
    steps = read_metrics(run).steps
    assert max(s["tree_forks"] for s in steps) > 0
    samples = [s for g in RunReader(run).groups("train_step = ?", STEPS) for s in g.samples]
    for s in samples:
        if s.fork is None:
            continue
        stem = next(
            candidate
            for candidate in samples
            if (candidate.group_id, candidate.index) == (s.group_id, s.fork.source)
        )
        assert list(s.response_ids[: s.fork.at]) == list(stem.response_ids[: s.fork.at])
        assert list(s.mu[: s.fork.at]) == list(stem.mu[: s.fork.at])
    assert any(s.fork is not None for s in samples)


def test_a_forked_sample_gives_the_gradient_of_one_that_is_built_by_hand(tmp_path: Path) -> None:
    train_batch = cases.single_rewards(cases.recorded())
    forked = replace(train_batch, groups=[branched(g, by_hand=False) for g in train_batch.groups])
    by_hand = replace(train_batch, groups=[branched(g, by_hand=True) for g in train_batch.groups])
    assert sum(s.fork is not None for g in forked.groups for s in g.samples) >= 12
    config = cases.config_of(None, tmp_path / "run")
    trainer, objective = Trainer(config, frozenset({"old"})), Objective(config.algo)
    try:
        (loss, expected, _), (found_loss, gradient, _) = (
            gradients(trainer, objective, t) for t in (by_hand, forked)
        )
        assert found_loss == pytest.approx(loss, abs=1e-6)
        assert float(expected.abs().max()) > 0
        assert float(torch.max(torch.abs(expected - gradient))) <= 1e-6
    finally:
        trainer.close()


def branched(group: SampleGroup, *, by_hand: bool) -> SampleGroup:
    """Every second sample begins with half of the one before it, and goes on with its own last tokens."""
    samples = [replace(s, routes=[]) for s in group.samples]
    for source, sibling in zip(samples[::2], samples[1::2], strict=False):
        fork_point, last = source.tokens // 2, sibling.tokens // 2
        tail = Segment(
            sibling.response_ids[last:],
            sibling.mu[last:],
            [VersionSpan(sibling.versions()[-1], 0, sibling.tokens - last)],
        )
        branch = Sample(
            sibling.sample_id,
            sibling.group_id,
            sibling.index,
            sibling.prompt_ids,
            sibling.seed,
            status=Status.FINISHED,
        )
        branch.reward = sibling.reward
        if by_hand:
            first = Segment(
                source.response_ids[:fork_point], source.mu[:fork_point], parts(source.spans, fork_point)
            )
            branch.append(first)
        else:
            fork(source, fork_point, branch)
            branch.behaviour = []
            assert branch.fork == Fork(source.index, fork_point)
        branch.append(tail)
        samples[sibling.index] = branch
    return replace(group, samples=samples)


def parts(spans: list[VersionSpan], at: int) -> list[VersionSpan]:
    return [VersionSpan(s.version, s.start, min(s.end, at)) for s in spans if s.start < at]
