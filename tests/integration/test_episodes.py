"""Samples of several sequences on the real trainer: a split changes no loss, no gradient and no denominator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.algo.objective import Objective
from rlsys.trainer.step import sample_table
from rlsys.trainer.trainer import Trainer
from tests.helpers import signal_cases as cases
from tests.helpers.episode_cases import split_groups
from tests.integration.test_passes import gradients

pytestmark = [pytest.mark.integration, pytest.mark.gate]

RECIPES = {
    "grpo": (),
    "dapo": ("algo.reducer=token_mean",),
    "dr_grpo": ("algo.advantage=dr_grpo", "algo.reducer={name: constant, length: 64}"),
    "decoupled": ("algo.anchor=old", "algo.corrections=[{name: tis, cap: 2.0}]"),
}


def test_a_rollout_that_is_split_into_sequences_gives_the_same_gradient(tmp_path: Path) -> None:
    unsplit_batch = cases.single_rewards(cases.recorded())
    parts = replace(unsplit_batch, groups=split_groups(unsplit_batch.groups))
    assert sum(len(s.extra_sequences) for g in parts.groups for s in g.samples) > 10
    config = cases.config_of(None, tmp_path / "run")
    trainer = Trainer(config, frozenset({"old"}))
    try:
        for name, overrides in RECIPES.items():
            objective = Objective(cases.config_of(None, tmp_path / "run", *overrides).algo)
            plans = [objective.plan(sample_table(t.groups, t.train_step, ())) for t in (unsplit_batch, parts)]
            assert plans[0].denominator == plans[1].denominator, name
            (loss, expected, _), (split_loss, split_gradient, _) = (
                gradients(trainer, objective, t) for t in (unsplit_batch, parts)
            )
            assert loss == pytest.approx(split_loss, abs=1e-6), name
            assert float(expected.abs().max()) > 0
            assert float((expected - split_gradient).abs().max()) <= 1e-6, (name, float(expected.abs().max()))
    finally:
        trainer.close()
