"""Steps of a policy with a critic of its own on the recorded batch, alone and, under torchrun, in other layouts:
`critic_cases.py WORKPLACE LAYOUT...`."""

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
OF_LAYOUT = ("padding_share", "shared_share")
"""Metrics of how a layout packs its samples: ranks pad and share prefixes within their own micro-batches."""


def start(run: Path, *overrides: str) -> tuple[Trainer, Critic, Objective]:
    """The recipe's policy and critic. In its first step the critic learns alone."""
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
    """Metrics of one train step on the recorded batch."""
    batch = signal_cases.single_rewards(signal_cases.stale(signal_cases.recorded()))
    metrics = train_step(trainer, objective, replace(batch, train_step=number))
    return {k: v for k, v in metrics.items() if isinstance(v, float | int) and k not in OF_LAYOUT}


def save(trainer: Trainer, objective: Objective, number: int) -> None:
    trainer.save_checkpoint(number, objective)
    trainer.finish_checkpoint(wait=True)


def main(workplace: Path, layouts: list[str]) -> None:
    """Three steps of each layout, and a fourth that goes on from the checkpoint of one process, for `seen.json`."""
    results: dict[str, Any] = {}
    for layout in layouts:
        trainer, _, objective = start(
            workplace / "alone", *(f"parallel.{pair}" for pair in layout.split(","))
        )
        steps = [step(trainer, objective, n) for n in (1, 2, 3)]
        assert trainer.load_checkpoint(objective) == 3
        results[layout] = [*steps, step(trainer, objective, 4)]
        if trainer.is_main:
            (workplace / "seen.json").write_text(json.dumps(results))
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
