"""Train steps of a policy with a separate critic on the recorded batch.

Under torchrun in several layouts: `critic_cases.py WORKSPACE LAYOUT...`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.algo.objective import Objective
from rlsys.trainer.critic import Critic, add_critic
from rlsys.trainer.step import train_step
from rlsys.trainer.trainer import Trainer
from tests.helpers import signal_cases

WARM_UP = 1
LAYOUT_METRICS = ("padding_share", "shared_share")
"""Metrics that depend on the layout: ranks pad and share prefixes within their own micro-batches."""


def start(run: Path, *overrides: str) -> tuple[Trainer, Critic, Objective]:
    """Return trainer, critic and objective of the recipe. In the first step only the critic learns."""
    config = signal_cases.config_of(
        "gae_critic", run, "trainer.lr=1e-3", "trainer.warmup_steps=0", *overrides
    )
    objective = Objective(config.algo)
    trainer = Trainer(config, objective.requirements.passes)
    assert objective.critic is not None
    add_critic(trainer, objective.critic)
    assert isinstance(trainer.critic, Critic)
    return trainer, trainer.critic, objective


def step(trainer: Trainer, objective: Objective, number: int) -> dict[str, Any]:
    """Run one train step on the recorded batch and return its metrics."""
    batch = signal_cases.single_rewards(signal_cases.stale(signal_cases.recorded()))
    metrics = train_step(trainer, objective, replace(batch, train_step=number))
    return {k: v for k, v in metrics.items() if isinstance(v, float | int) and k not in LAYOUT_METRICS}


def save(trainer: Trainer, objective: Objective, number: int) -> None:
    trainer.save_checkpoint(number, objective)
    trainer.finish_checkpoint(wait=True)


def main(workspace: Path, layouts: list[str]) -> None:
    """Run three steps in each layout, load the checkpoint of a single process, and run a fourth step.

    The metrics are written to `seen.json`.
    """
    results: dict[str, Any] = {}
    for layout in layouts:
        trainer, _, objective = start(
            workspace / "alone", *(f"parallel.{pair}" for pair in layout.split(","))
        )
        steps = [step(trainer, objective, n) for n in (1, 2, 3)]
        assert trainer.load_checkpoint(objective) == 3
        results[layout] = [*steps, step(trainer, objective, 4)]
        if trainer.is_main:
            (workspace / "seen.json").write_text(json.dumps(results))
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
